"""Screens of words, numbers and widgets, drawn in many fonts, and what a reader should make of each.

A screen is a picture of 256 × 256 pixels. Its reader makes 8 × 8 tokens of it, one for each square of 32
pixels, and each should be the language model's own embedding of one token: what stands in the square.

| drawn | tokens, from the square in which it begins |
|---|---|
| a word in a colour | the word, the colour |
| a button: a dot and a word in a frame, in a colour | `button`, the word, the colour |
| a word, then a checkbox | the word, `on` or `off` |
| a field: a label, then a word in a frame | the label, `:`, the word |
| a number: a label, then two digits in a frame | the label, `:`, a digit, a digit |
| a highlighted row | `selected`, then what stands in it |

All other squares are a line break. Everything is drawn from the generator that is handed in.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE, SQUARE, PATCH, SLICE = 256, 32, 16, 4
SQUARES = SIDE // SQUARE
COLOURS = {
    "red": (200, 20, 20),
    "blue": (20, 40, 210),
    "green": (10, 130, 30),
    "black": (0, 0, 0),
    "orange": (235, 120, 0),
    "purple": (125, 20, 155),
    "gray": (125, 125, 125),
    "brown": (115, 65, 20),
}
PAPERS = ((255, 255, 255), (240, 240, 245), (250, 245, 230), (228, 236, 246))
MARK = (255, 236, 140)
NAMES = ("button", "on", "off", "selected")
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
LABELS = """
Save Open Close Search Price Total Home File Edit View Help User Send Back Next Map Date Time Title Page
Photo Video Music Light Dark Mode Type Size Color Phone Address City Country Account Profile Sound Name
Email Delete Add New Print Copy Start Stop Play Share Like Login Sign Menu List Table Image Text Font
Style Link Note Notes Task Tasks Project Team Group Member Role Status State Active Public Private Order
Orders Item Items Product Cart Pay Payment Card Bank Cost Tax Amount Count Number Code Key Value Data
Report Chart Graph Filter Sort Level Score Rank Rate Review Comment Message Chat Call Contact Event
Events Meeting Room Office Street Zip Region Weather Water Power Battery Network Server Client Host Port
Path Version Update Updates Install Remove Apply Submit Confirm Accept Yes Join Leave Follow Block Error
Warning Info Test Run Build Model Input Output Source Target Left Right Top Bottom Center Height Depth
Weight Speed Voice Camera Screen Window Mouse Theme Night Day Week Month Year
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Items:
    """What a vocabulary offers to screens: `words`, and the token id of each text that can stand in one."""

    words: tuple[str, ...]
    ids: Mapping[str, int]

    @property
    def texts(self) -> list[str]:
        """All that can stand in a square; the line break of an empty one comes last."""
        return list(self.ids)


def items_of(vocabulary: Mapping[str, int], words: int = 600) -> Items:
    """The labels, then the commonest words of 3 to 7 letters that have a plural: all of them one token."""
    labels = [word for word in LABELS if f"Ġ{word}" in vocabulary and len(word) <= 7]
    common = sorted(
        (index, piece[1:])
        for piece, index in vocabulary.items()
        if re.fullmatch("Ġ[a-z]{3,7}", piece) and f"{piece}s" in vocabulary
    )
    known = {*COLOURS, *NAMES}
    chosen = [*labels, *(word for _, word in common if word not in known)][:words]
    ids = {text: vocabulary[f"Ġ{text}"] for text in (*chosen, *COLOURS, *NAMES)}
    return Items(
        tuple(chosen),
        ids | {text: vocabulary[text] for text in (":", *"0123456789")} | {"\n": vocabulary["Ċ"]},
    )


@dataclass(frozen=True)
class Style:
    """How freely a screen is drawn: the first `faces` of `FACES`, starts in steps of `step` pixels within a
    square, up to `rise` pixels up or down."""

    faces: int
    step: int
    rise: int


LEVELS = (
    Style(faces=2, step=32, rise=0),
    Style(faces=4, step=16, rise=0),
    Style(faces=6, step=8, rise=0),
)
"""Ever freer styles; the last is what the reader is measured on."""


@dataclass
class Screen:
    """A picture, the text of each square [8][8], what was drawn (kind, word, answer), in which of `FACES` and
    in which square (row, column), and the characters under it [16, 64]."""

    picture: Image.Image
    texts: list[list[str]]
    shown: list[tuple[str, ...]] = field(default_factory=list)
    faces: list[int] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    characters: np.ndarray = field(default_factory=lambda: np.zeros((SIDE // PATCH, SIDE // SLICE), np.int64))

    def leads(self, index: int) -> bool:
        """Whether this thing is the first of a highlighted row."""
        row, column = self.places[index]
        first = min(across for down, across in self.places if down == row)
        return self.texts[row][0] == "selected" and column == first


FACES: tuple[tuple[str, int], ...] = (
    ("", 13), ("DejaVuSans.ttf", 12), ("DejaVuSans-Bold.ttf", 11), ("DejaVuSerif.ttf", 12),
    ("STIXGeneral.ttf", 15), ("", 14),
    ("DejaVuSansMono.ttf", 11), ("DejaVuSans.ttf", 13), ("STIXGeneralBol.ttf", 14),
)  # fmt: skip
"""File (of matplotlib's fonts; "" is the one that Pillow carries) and size in pixels, the easy ones first.

No style draws in the last three: the reader never sees them before it is measured on them."""


@functools.cache
def face(index: int) -> Any:
    """The font of `FACES`."""
    name, size = FACES[index]
    if not name:
        return ImageFont.load_default(size)
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)


@functools.lru_cache(maxsize=50_000)
def _extent(text: str, index: int) -> tuple[float, tuple[float, ...]]:
    """The width of a text in pixels, and the middle of each of its characters."""
    font = face(index)
    ends = [font.getlength(text[: end + 1]) for end in range(len(text))]
    return ends[-1], tuple((start + end) / 2 for start, end in zip([0.0, *ends], ends, strict=False))


class Painter:
    """Draws screens of ``items`` with a generator of its own; in `FACES` of ``faces`` alone, if given."""

    def __init__(self, items: Items, seed: int, style: Style = LEVELS[-1], faces: Sequence[int] = ()):
        self.items, self.style, self._faces = items, style, faces
        self._random = random.Random(seed)

    def screen(self, density: float = 0.9, most: int | None = None, words: float = 0.4) -> Screen:
        """A screen whose rows are filled with this probability, with at most this many things on it.

        ``words`` is the share of plain words among them.
        """
        draw, rows = self._random, list(range(SQUARES))
        screen = Screen(
            Image.new("RGB", (SIDE, SIDE), draw.choice(PAPERS)), [["\n"] * SQUARES for _ in range(SQUARES)]
        )
        canvas = ImageDraw.Draw(screen.picture)
        canvas.fontmode = "L"
        marked = draw.randrange(SQUARES) if draw.random() < 0.5 else -1
        draw.shuffle(rows)
        for row in rows:
            if draw.random() < density and (most is None or len(screen.shown) < most):
                self._fill(screen, canvas, row, row == marked, most, words)
        return screen

    def _fill(
        self, screen: Screen, canvas: Any, row: int, marked: bool, most: int | None, words: float
    ) -> None:
        draw, column = self._random, 0
        if marked:
            canvas.rectangle((0, row * SQUARE + 1, SIDE, row * SQUARE + SQUARE - 2), fill=MARK)
            screen.texts[row][0], column = "selected", 1
        left = column * SQUARE
        misses = 0
        while misses < 3 and (most is None or len(screen.shown) < most):
            column += draw.choice((0, 0, 0, 0, 1))
            start = max(left, column * SQUARE)
            start += draw.randrange(0, SQUARE, self.style.step) if self.style.step < SQUARE else 0
            column = start // SQUARE
            kind = "word" if draw.random() < words else draw.choice(("button", "check", "field", "number"))
            texts, right = self._place(screen, canvas, kind, start + 3, row * SQUARE + SQUARE // 2, column)
            if not texts:
                misses += 1
                continue
            screen.texts[row][column : column + len(texts)] = texts
            left, column = right + 5, column + len(texts)
            if left > column * SQUARE:  # nothing else begins in a square that this one reaches into
                column = -(-left // SQUARE) if draw.random() < 0.5 else left // SQUARE
                left = max(left, column * SQUARE)

    def _place(
        self, screen: Screen, canvas: Any, kind: str, x: int, y: int, column: int
    ) -> tuple[list[str], int]:
        """Draw something from ``x`` on; the texts of its squares (none without room), and its end."""
        draw, style = self._random, self.style
        index = draw.choice(self._faces or range(style.faces))
        y += draw.randint(-style.rise, style.rise)
        word, other = draw.sample(self.items.words, 2)
        colour = draw.choice(list(COLOURS))
        ink = COLOURS[colour]
        width = round(_extent(word, index)[0])
        digits = f"{draw.randrange(10, 100)}"
        value = other if kind == "field" else digits
        state = draw.choice(("on", "off"))
        texts = {
            "word": [word, colour],
            "button": ["button", word, colour],
            "check": [word, state],
            "field": [word, ":", other],
            "number": [word, ":", *digits],
        }[kind]
        inside = round(_extent(value, index)[0])
        framed = (column + 2) * SQUARE + 3 - x if kind in ("field", "number") else 0  # from x to the frame
        right = x + {"word": width, "button": SQUARE + width + 8, "check": width + 20}.get(
            kind, framed + inside + 8
        )
        if right > SIDE - 2 or column + len(texts) > SQUARES or width > 66 or (framed and width > framed - 4):
            return [], 0
        black = draw.choice(((0, 0, 0), (40, 40, 40), (20, 20, 90)))
        if kind == "word":
            self._write(screen, canvas, x, y, word, index, ink)
            shown: tuple[str, ...] = ("word", word, colour)
        elif kind == "button":
            edge, fill = ((120, 120, 120), (225, 225, 228)) if draw.random() < 0.5 else (ink, (252, 252, 252))
            canvas.rounded_rectangle((x, y - 11, right, y + 11), 4, fill=fill, outline=edge)
            canvas.ellipse((x + 9, y - 5, x + 19, y + 5), fill=ink)
            self._write(screen, canvas, x + SQUARE, y, word, index, ink)
            shown = ("button", word, colour)
        elif kind == "check":
            self._write(screen, canvas, x, y, word, index, black)
            box = x + width + 7
            canvas.rectangle((box, y - 6, box + 12, y + 6), fill=(255, 255, 255), outline=(90, 90, 90))
            if state == "on":
                canvas.line((box + 3, y, box + 5, y + 4, box + 10, y - 4), fill=(0, 90, 200), width=2)
            shown = ("check", word, state)
        else:
            self._write(screen, canvas, x, y, word, index, black)
            canvas.rectangle(
                (x + framed, y - 10, right, y + 10), fill=(255, 255, 255), outline=(140, 140, 140)
            )
            self._write(screen, canvas, x + framed + 4, y, value, index, black)
            shown = (kind, word, value)
        screen.shown.append(shown)
        screen.faces.append(index)
        screen.places.append((y // SQUARE, column))
        return texts, right

    def _write(self, screen: Screen, canvas: Any, x: int, y: int, text: str, index: int, ink: Any) -> None:
        canvas.text((x, y), text, fill=ink, font=face(index), anchor="lm")
        row = y // SQUARE * 2
        for character, middle in zip(text, _extent(text, index)[1], strict=True):
            at = min(int((x + middle) / SLICE), SIDE // SLICE - 1)
            screen.characters[row : row + 2, at] = CHARACTERS.index(character) + 1


def pixels(screens: Sequence[Screen]) -> np.ndarray:
    """[screens, 3, 256, 256] as the processor makes them: -1 to 1."""
    stacked = np.stack([np.asarray(screen.picture) for screen in screens])
    return stacked.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
