"""Pages rendered as ordinary pictures: text, shapes with captions, and questions that need two of them.

Drawn with Pillow's built-in bitmap font and integer geometry, so that a seed gives the same pixels on
every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from kamera.certify.probe import Query

SYSTEM = "You read pages and answer in one word."
SIZE = 448
"""Side of a page in pixels: 16 tokens of 28 pixels each way in Qwen2.5-VL."""

ENTRIES = 6
"""Entries of a page; a guess among what it shows is right once in so many."""

_SCALE = 2
_INK, _PAPER = (20, 20, 20), (250, 250, 245)

NAMES = (
    *("Anna", "Boris", "Carla", "David", "Elena", "Felix", "Greta", "Henry"),
    *("Irene", "Jonas", "Karin", "Leo", "Maria", "Nils", "Olga", "Peter"),
)
TOWNS = (
    *("Oslo", "Lima", "Cairo", "Delhi", "Paris", "Quito"),
    *("Seoul", "Dublin", "Havana", "Rome", "Berlin", "Prague"),
)
FRUITS = (
    *("apple", "banana", "cherry", "grape", "lemon", "mango"),
    *("peach", "plum", "fig", "melon", "olive", "pear"),
)
COLOURS = {
    "red": (215, 30, 30),
    "green": (25, 140, 45),
    "blue": (35, 70, 220),
    "yellow": (240, 205, 20),
    "purple": (130, 40, 170),
    "orange": (245, 130, 20),
    "black": (15, 15, 15),
    "brown": (120, 70, 30),
}
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star")

Content = list[dict[str, Any]]


class _Words(NamedTuple):
    """What a pair of pages speaks of; the distractor speaks of others."""

    people: list[str]
    towns: list[str]
    fruits: list[str]


class _Pair(NamedTuple):
    """Two pages that answer together, and their questions; the first page alone is the distractor."""

    first: Image.Image
    second: Image.Image
    queries: list[Query]


def draw_scene(rng: np.random.Generator, index: int) -> tuple[str, tuple[Content, ...], list[Query]]:
    """System prompt, three pages as chat content, and `ENTRIES` questions in random order.

    The first page is like the second, of other people; the third refers to what the second says.
    Templates take turns by ``index``.
    """
    template = _TEMPLATES[index % len(_TEMPLATES)]
    mixed = [_some(rng, words, 2 * ENTRIES) for words in (NAMES, TOWNS, FRUITS)]
    pair = template(rng, _Words(*(words[:ENTRIES] for words in mixed)))
    other = template(rng, _Words(*(words[ENTRIES:] for words in mixed)))
    pages = (other.first, pair.first, pair.second)
    contents: tuple[Content, ...] = tuple(
        [{"type": "image", "image": page}, {"type": "text", "text": f"Page {number}.\n"}]
        for number, page in enumerate(pages, start=1)
    )
    return SYSTEM, contents, [pair.queries[i] for i in rng.permutation(ENTRIES)]


def _badges(rng: np.random.Generator, words: _Words) -> _Pair:
    """Painted shapes with a name under each; then who lives where, in sentences."""
    people, towns, colours = words.people, words.towns, _some(rng, tuple(COLOURS))
    shapes = [SHAPES[i] for i in rng.integers(len(SHAPES), size=ENTRIES)]
    first = _gallery("Badges", [(s, c, p) for s, c, p in zip(shapes, colours, people, strict=True)])
    second = _text("Homes", [f"{p} lives in {t}." for p, t in _mixed(rng, people, towns)])
    ask = "Which colour is the badge of the person who lives in {}? Answer in one word."
    return _Pair(first, second, _queries(ask, towns, colours))


def _crates(rng: np.random.Generator, words: _Words) -> _Pair:
    """Who owns which fruit, in sentences; then a fruit's name under each shape."""
    people, fruits, shapes = words.people, words.fruits, _some(rng, SHAPES)
    paints = [list(COLOURS)[i] for i in rng.integers(len(COLOURS), size=ENTRIES)]
    first = _text("Owners", [f"The {f} crate belongs to {p}." for p, f in _mixed(rng, people, fruits)])
    second = _gallery("Crates", [(s, c, f) for s, c, f in zip(shapes, paints, fruits, strict=True)])
    ask = "Who owns the crate with the {} on it? Answer with one name."
    return _Pair(first, second, _queries(ask, shapes, people))


def _ledger(rng: np.random.Generator, words: _Words) -> _Pair:
    """A table of towns and colours; then who goes to which town, in sentences."""
    people, towns, colours = words.people, words.towns, _some(rng, tuple(COLOURS))
    first = _text("Flags", [f"{t:<8} {c}" for t, c in _mixed(rng, towns, colours)])
    second = _text("Journeys", [f"{p} is going to {t}." for p, t in _mixed(rng, people, towns)])
    ask = "Which colour is the flag of the town that {} is going to? Answer in one word."
    return _Pair(first, second, _queries(ask, people, colours))


_TEMPLATES: tuple[Callable[[np.random.Generator, _Words], _Pair], ...] = (_badges, _crates, _ledger)


def _some(rng: np.random.Generator, words: Sequence[str], count: int = ENTRIES) -> list[str]:
    return [words[i] for i in rng.permutation(len(words))[:count]]


def _mixed(rng: np.random.Generator, left: Sequence[str], right: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs in random order: the place of a line must not give the answer away."""
    pairs = list(zip(left, right, strict=True))
    return [pairs[i] for i in rng.permutation(len(pairs))]


def _queries(ask: str, subjects: Sequence[str], answers: Sequence[str]) -> list[Query]:
    options = tuple(sorted(answers))
    return [Query(ask.format(s), a, options) for s, a in zip(subjects, answers, strict=True)]


def _text(title: str, lines: Sequence[str]) -> Image.Image:
    page = Image.new("RGB", (SIZE, SIZE), _PAPER)
    _write(page, title, (24, 20), scale=3)
    for row, line in enumerate(lines):
        _write(page, line, (24, 92 + 56 * row))
    return page


def _gallery(title: str, cells: Sequence[tuple[str, str, str]]) -> Image.Image:
    """Three columns of (shape, colour, caption)."""
    page = Image.new("RGB", (SIZE, SIZE), _PAPER)
    _write(page, title, (24, 20), scale=3)
    for i, (shape, colour, caption) in enumerate(cells):
        x, y = 24 + 144 * (i % 3), 84 + 184 * (i // 3)
        _shape(ImageDraw.Draw(page), shape, COLOURS[colour], x + 8, y)
        _write(page, caption, (x, y + 116))
    return page


def _shape(draw: ImageDraw.ImageDraw, shape: str, fill: tuple[int, int, int], x: int, y: int) -> None:
    """A shape in the square of 96 pixels at (x, y)."""
    polygons = {
        "square": [(0, 0), (96, 0), (96, 96), (0, 96)],
        "triangle": [(48, 0), (96, 96), (0, 96)],
        "diamond": [(48, 0), (96, 48), (48, 96), (0, 48)],
        "cross": [
            *((32, 0), (64, 0), (64, 32), (96, 32), (96, 64), (64, 64)),
            *((64, 96), (32, 96), (32, 64), (0, 64), (0, 32), (32, 32)),
        ],
        "star": [
            *((48, 0), (59, 34), (96, 34), (66, 56), (78, 92)),
            *((48, 70), (18, 92), (30, 56), (0, 34), (37, 34)),
        ],
    }
    if shape == "circle":
        draw.ellipse((x, y, x + 96, y + 96), fill=fill)
    else:
        draw.polygon([(x + dx, y + dy) for dx, dy in polygons[shape]], fill=fill)


def _write(page: Image.Image, text: str, at: tuple[int, int], scale: int = _SCALE) -> None:
    font = ImageFont.load_default_imagefont()
    _, _, width, height = (int(v) for v in font.getbbox(text))
    line = Image.new("1", (width, height))
    ImageDraw.Draw(line).text((0, 0), text, fill=1, font=font)
    mask = line.resize((width * scale, height * scale), Image.Resampling.NEAREST)
    page.paste(_INK, at, mask)
