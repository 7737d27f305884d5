"""Pages rendered as ordinary pictures: text that later pages correct, shapes with captions, and questions.

They are drawn with Pillow's built-in bitmap font and integer geometry, so that a seed gives equal pixels on
every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from kamera.certify.probe import ORDERS, READER, TRIALS, Order, ProbeScene, ReaderFact, draw, draw_queries

SIZE = 448
"""Side of a page in pixels: 16 tokens of 28 pixels in Qwen2.5-VL."""

ENTRIES = 6
"""Entries that the reader shows."""

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
_POLYGONS = {
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
SHAPES = ("circle", *_POLYGONS)

UNKNOWN = "unknown"

SYSTEM = (
    "You read pages in order. Where two pages disagree the later one is right: it corrects the earlier one. "
    f"Answer in one word; answer {UNKNOWN} where no page says it."
)

_STATES: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3), (2, 3, 4, 5), (4, 5), (), (0, 1, 2, 3))
"""The entries that each page states. The first two are on the first page and on its substitute, the next two
on the second page too, the last two on the second and the third: so some facts leave with a page, some are
corrected by a later one, and some change when the order does."""

_FILLED = 4
"""Entries of a page that states something; a page with fewer is filled with entries no question is about."""


class _Template(NamedTuple):
    """A kind of facts: entries have values, and the reader shows each entry beside a handle.

    ``says`` is a line of a page that states them, ``asks`` a question about an entry by name, ``reads`` one
    by its handle; ``shown`` is the title of the reader's page.
    """

    title: str
    entries: tuple[str, ...]
    values: tuple[str, ...]
    handles: tuple[str, ...]
    says: str
    asks: str
    reads: str
    shown: str


def draw_scene(seed: int, index: int) -> ProbeScene:
    """The scene of number ``index``; templates take turns."""
    rng, template = np.random.default_rng([seed, index]), _TEMPLATES[index % len(_TEMPLATES)]
    entries = draw(rng, template.entries, ENTRIES + _FILLED)
    handles = draw(rng, template.handles, ENTRIES)
    others = entries[ENTRIES:]  # no question is about these
    stated: list[dict[str, str]] = []
    for numbers in _STATES:
        named = [entries[i] for i in numbers]
        # other values on every page: two pages that state the same entry disagree
        free = [v for v in template.values if v not in {v for page in stated for v in page.values()}]
        values = draw(rng, free if len(free) >= len(named) else template.values, len(named))
        stated.append(dict(zip(named, values, strict=True)))
    pages = []
    for number, facts in enumerate(stated):
        if number == READER:
            pages.append(_reader(rng, template.shown, list(zip(handles, entries, strict=False))))
            continue
        spare = [v for v in template.values if v not in facts.values()]
        filled = zip(others, draw(rng, spare, _FILLED - len(facts)), strict=False)
        # in random order: the place of a line must not give the answer away
        lines = [template.says.format(e, v) for e, v in draw(rng, [*facts.items(), *filled])]
        pages.append(_text(template.title, lines))

    readings: dict[Order, dict[str, ReaderFact]] = {}
    for behind in ORDERS:
        answers = {h: _statement(stated, e, behind) for h, e in zip(handles, entries, strict=False)}
        readings[behind] = {
            template.reads.format(h): ReaderFact(a or UNKNOWN, a is not None) for h, a in answers.items()
        }

    order = TRIALS["patched"][1]
    disputed = [e for e in entries[:ENTRIES] if len({stated[i][e] for i in order if e in stated[i]}) > 1]
    contested = {template.asks.format(e): _statement(stated, e, order) or UNKNOWN for e in disputed}
    end: dict[str, Any] = {"type": "text", "text": "\n"}
    contents = tuple([{"type": "image", "image": page}, end] for page in pages)
    return ProbeScene(SYSTEM, contents, draw_queries(rng, readings, contested, (*template.values, UNKNOWN)))


def _statement(stated: Sequence[Mapping[str, str]], entry: str, order: Order) -> str | None:
    """What the last page in this order that states an entry says of it."""
    return next((stated[i][entry] for i in reversed(order) if entry in stated[i]), None)


_TEMPLATES: tuple[_Template, ...] = (
    _Template(
        "Homes: notice",
        NAMES,
        TOWNS,
        tuple(COLOURS),
        "{} lives in {}.",
        "In which town does {} live? Answer in one word.",
        "In which town does the person with the {} badge live? Answer in one word.",
        "Badges",
    ),
    _Template(
        "Owners: notice",
        FRUITS,
        NAMES,
        SHAPES,
        "The {} crate belongs to {}.",
        "Who owns the {} crate? Answer with one name.",
        "Who owns the crate with the {} on it? Answer with one name.",
        "Crates",
    ),
    _Template(
        "Flags: notice",
        TOWNS,
        tuple(COLOURS),
        NAMES,
        "The flag of {} is {}.",
        "Which colour is the flag of {}? Answer in one word.",
        "Which colour is the flag of the town that {} is going to? Answer in one word.",
        "Journeys",
    ),
)


def _text(title: str, lines: Sequence[str]) -> Image.Image:
    page = Image.new("RGB", (SIZE, SIZE), _PAPER)
    _write(page, title, (24, 20), scale=3)
    for row, line in enumerate(lines):
        _write(page, line, (24, 92 + 56 * row))
    return page


def _reader(rng: np.random.Generator, title: str, shown: Sequence[tuple[str, str]]) -> Image.Image:
    """Each handle beside its entry: a person in a sentence, or a shape or its colour above it."""
    if title == "Journeys":
        return _text(title, [f"{person} is going to {town}." for person, town in draw(rng, shown)])
    page = Image.new("RGB", (SIZE, SIZE), _PAPER)
    _write(page, title, (24, 20), scale=3)
    free = tuple(COLOURS) if shown[0][0] in SHAPES else SHAPES
    drawn = rng.integers(len(free), size=len(shown)).tolist()
    for i, ((handle, entry), other) in enumerate(zip(shown, drawn, strict=True)):
        x, y = 24 + 144 * (i % 3), 84 + 184 * (i // 3)
        shape, colour = (handle, free[other]) if handle in SHAPES else (free[other], handle)
        _shape(ImageDraw.Draw(page), shape, COLOURS[colour], x + 8, y)
        _write(page, entry, (x, y + 116))
    return page


def _shape(on: ImageDraw.ImageDraw, shape: str, fill: tuple[int, int, int], x: int, y: int) -> None:
    """A shape in the square of 96 pixels at (x, y)."""
    if shape == "circle":
        on.ellipse((x, y, x + 96, y + 96), fill=fill)
    else:
        on.polygon([(x + dx, y + dy) for dx, dy in _POLYGONS[shape]], fill=fill)


def _write(page: Image.Image, text: str, at: tuple[int, int], scale: int = _SCALE) -> None:
    font = ImageFont.load_default_imagefont()
    _, _, width, height = (int(v) for v in font.getbbox(text))
    line = Image.new("1", (width, height))
    ImageDraw.Draw(line).text((0, 0), text, fill=1, font=font)
    mask = line.resize((width * scale, height * scale), Image.Resampling.NEAREST)
    page.paste(_INK, at, mask)
