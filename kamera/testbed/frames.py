"""Frames of the synthetic world: the facts of one picture, or of its text twin.

A *legend* shows glyphs painted in colours. A *rename* replaces one glyph by another. An *items* frame shows
white glyphs, each with a two-digit tag. A *picture* is a distractor. Every kind except the picture has a text
twin that states the facts in words.

As pixels a cell is 8 x 8 modules of 2 pixels. Rows 0-4 hold a mirror-symmetric glyph, rows 6-7 a 16-module
plate: an item's tag, or the glyph that is renamed. Code words differ in at least five modules, so a decoded
video still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from PIL import Image

GLYPHS: tuple[str, ...] = (
    *("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"),
    *("iota", "kappa", "lambda", "mu", "nu", "xi", "omicron", "pi"),
    *("rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega"),
)
"""Names of the shapes that frames show."""
COLOURS: tuple[str, ...] = (
    *("red", "green", "blue", "yellow", "cyan", "magenta", "orange", "purple"),
    *("pink", "brown", "lime", "teal", "navy", "olive", "salmon", "gray"),
)
"""Names of their colours."""
TAGS: tuple[str, ...] = tuple(str(number) for number in range(10, 100))
"""Numbers that items bear."""
DEFAULTS: tuple[int, ...] = tuple((5 * glyph + 3) % len(COLOURS) for glyph in range(len(GLYPHS)))
"""The colour of each glyph that no frame mentions."""

BLANK = -1
SMALL_GRID, SMALL_FACTS, SMALL_REPEAT = 8, 12, 5
ITEM_SIDE = 2
ITEMS_SHOWN = {"items": 30, "page": 54}
ITEMS_GRID = {"items": 12, "page": 16}
KINDS = {"L": "legend", "R": "rename", "I": "items", "B": "page", "P": "picture"}
"""Letters of a layout. Small letters l, r and i are the text twins."""

MODULE = 2
CELL = 8 * MODULE
BACKGROUND = np.array((22, 22, 28), dtype=np.uint8)
WHITE = np.array((245, 245, 245), dtype=np.uint8)
PLATE = np.array((205, 205, 215), dtype=np.uint8)
RGB = np.array(
    [
        (230, 30, 30),  # red
        (20, 150, 40),  # green
        (40, 80, 250),  # blue
        (250, 230, 30),  # yellow
        (40, 230, 240),  # cyan
        (240, 40, 220),  # magenta
        (250, 135, 15),  # orange
        (125, 30, 200),  # purple
        (255, 170, 215),  # pink
        (125, 70, 30),  # brown
        (140, 250, 50),  # lime
        (15, 130, 135),  # teal
        (25, 25, 125),  # navy
        (125, 130, 20),  # olive
        (250, 135, 125),  # salmon
        (135, 135, 140),  # gray
    ],
    dtype=np.uint8,
)

Cells = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Fact:
    """One fact of a frame, as indices into `GLYPHS`, `COLOURS` and `TAGS`; `BLANK` for none.

    Legend: `glyph` has `colour`. Rename: `glyph` is replaced by `target`. Items: `tag` shows `glyph`.
    """

    glyph: int
    colour: int = BLANK
    tag: int = BLANK
    target: int = BLANK


@dataclass(frozen=True)
class Frame:
    """One picture of the world, or its text twin.

    `kind` is a value of `KINDS` (`page` is a large items frame). `cells` `[rows][columns]` are
    indices into `facts`, `BLANK` for an empty cell; one cell is one vision token of the
    backbones. A text twin has no cells.
    """

    kind: str
    facts: tuple[Fact, ...]
    cells: Cells = ()
    texture: int = 0

    @property
    def is_text(self) -> bool:
        """True if the facts are words."""
        return self.kind != "picture" and not self.cells

    @property
    def shows_items(self) -> bool:
        """True if the frame shows tagged glyphs."""
        return self.kind in ITEMS_GRID

    @property
    def caption(self) -> str:
        """The text that follows the picture in its chunk, its newline included."""
        return f"{self.kind}\n"

    @property
    def text(self) -> str:
        """The text twin's words, one line per fact, then the caption."""
        return "".join(f"{sentence(self.kind, fact)}\n" for fact in self.facts) + self.caption

    @cached_property
    def image(self) -> Image.Image:
        """The frame as an RGB picture, 16 pixels to a cell."""
        return Image.fromarray(pixels([self])[0])

    @property
    def content(self) -> list[dict[str, Any]]:
        """The frame as a chat content list: the picture and its caption, or the text."""
        if self.is_text:
            return [{"type": "text", "text": self.text}]
        return [{"type": "image", "image": self.image}, {"type": "text", "text": self.caption}]

    def at_cells(self, name: str) -> np.ndarray:
        """The field `name` of the fact in each cell, `[rows, columns]`."""
        values = np.array([*(getattr(fact, name) for fact in self.facts), BLANK])
        return np.asarray(values[np.array(self.cells)])

    @cached_property
    def colour_of(self) -> dict[int, int]:
        """Legend: glyph to colour. Empty for other frames."""
        return {fact.glyph: fact.colour for fact in self.facts if self.kind == "legend"}

    @cached_property
    def target_of(self) -> dict[int, int]:
        """Rename: glyph to its target. Empty for other frames."""
        return {fact.glyph: fact.target for fact in self.facts if self.kind == "rename"}

    @cached_property
    def glyph_of(self) -> dict[int, int]:
        """Items frame: tag to glyph. Empty for other frames."""
        return {fact.tag: fact.glyph for fact in self.facts if self.shows_items}


def sentence(kind: str, fact: Fact) -> str:
    """A fact in words; only its last word completes it."""
    if kind == "legend":
        return f"glyph {GLYPHS[fact.glyph]} {COLOURS[fact.colour]}"
    if kind == "rename":
        return f"glyph {GLYPHS[fact.glyph]} {GLYPHS[fact.target]}"
    return f"tag {TAGS[fact.tag]} {GLYPHS[fact.glyph]}"


def draw_frame(letter: str, rng: np.random.Generator, tags: np.ndarray) -> Frame:
    """A frame of this letter; `tags` are those still free for items."""
    kind = KINDS[letter.upper()]
    if kind == "picture":
        cells = _freeze(np.full((SMALL_GRID, SMALL_GRID), BLANK))
        return Frame(kind, (), cells, texture=int(rng.integers(2**31)))
    if kind in ITEMS_GRID:
        glyphs = rng.integers(len(GLYPHS), size=ITEMS_SHOWN[kind])
        facts = [Fact(int(g), tag=int(t)) for g, t in zip(glyphs, tags, strict=False)]
    else:
        subjects = rng.permutation(len(GLYPHS))[:SMALL_FACTS]
        if kind == "legend":
            values = rng.integers(len(COLOURS), size=SMALL_FACTS)
            facts = [Fact(int(g), colour=int(c)) for g, c in zip(subjects, values, strict=True)]
        else:
            values = (subjects + rng.integers(1, len(GLYPHS), size=SMALL_FACTS)) % len(GLYPHS)
            facts = [Fact(int(g), target=int(t)) for g, t in zip(subjects, values, strict=True)]
    cells = () if letter.islower() else place_facts(kind, len(facts), rng)
    return Frame(kind, tuple(facts), cells)


def place_facts(kind: str, count: int, rng: np.random.Generator) -> Cells:
    """Which fact each cell shows: items fill 2 x 2 cells each, other facts five scattered ones."""
    if kind in ITEMS_GRID:
        side = ITEMS_GRID[kind] // ITEM_SIDE
        slots = np.full(side * side, BLANK)
        slots[rng.permutation(side * side)[:count]] = np.arange(count)
        return _freeze(np.kron(slots.reshape(side, side), np.ones((ITEM_SIDE, ITEM_SIDE), dtype=int)))
    cells = np.full(SMALL_GRID * SMALL_GRID, BLANK)
    cells[: count * SMALL_REPEAT] = np.repeat(np.arange(count), SMALL_REPEAT)
    return _freeze(rng.permutation(cells).reshape(SMALL_GRID, SMALL_GRID))


def _freeze(cells: np.ndarray) -> Cells:
    return tuple(map(tuple, cells.tolist()))


# -- pixels ----------------------------------------------------------------------------------------


def _code_words(bits: int, count: int, distance: int, weight: range) -> np.ndarray:
    """`count` words of `bits` bits, pairwise at least `distance` apart: `[count, bits]` bool."""
    order = np.random.default_rng(7).permutation(2**bits)
    words = (order[:, None] >> np.arange(bits)) & 1
    words = words[np.isin(words.sum(1), list(weight))]
    code = np.empty((0, bits), dtype=words.dtype)
    for word in words:
        if len(code) == 0 or (code != word).sum(1).min() >= distance:
            code = np.vstack([code, word])
        if len(code) == count:
            return code.astype(bool)
    raise ValueError(f"only {len(code)} of {count} words of {bits} bits are {distance} apart")


@lru_cache(maxsize=1)
def stamps() -> tuple[np.ndarray, np.ndarray]:
    """Masks of glyphs `[glyphs + 1, 8, 8]` and plates `[tags + glyphs + 1, 8, 8]`; the last is blank."""
    glyphs = np.zeros((len(GLYPHS) + 1, 8, 8), dtype=bool)
    half = _code_words(15, len(GLYPHS), 5, range(6, 11)).reshape(-1, 5, 3)
    glyphs[:-1, 0:5, 1:7] = np.concatenate([half, half[:, :, ::-1]], axis=2)
    codes = len(TAGS) + len(GLYPHS)
    plates = np.zeros((codes + 1, 8, 8), dtype=bool)
    plates[:-1, 6:8] = _code_words(16, codes, 5, range(4, 13)).reshape(-1, 2, 8)
    return glyphs, plates


def paint(glyphs: np.ndarray, colours: np.ndarray, plates: np.ndarray) -> np.ndarray:
    """Pixels of cell grids.

    All arguments are `[n, rows, columns]` of indices, `BLANK` for none; a glyph without a colour
    is white; plates are tags, then glyphs. Returns `[n, rows * 16, columns * 16, 3]` uint8.
    """
    glyph_masks, plate_masks = stamps()
    ink = np.where((colours == BLANK)[..., None], WHITE, RGB[colours])[..., None, None, :]
    modules = np.where(glyph_masks[glyphs][..., None], ink, BACKGROUND)
    modules = np.where(plate_masks[plates][..., None], PLATE, modules)
    return _enlarge(modules)


def _enlarge(modules: np.ndarray) -> np.ndarray:
    """`[n, rows, columns, 8, 8, 3]` modules to `[n, rows * 16, columns * 16, 3]` pixels."""
    n, rows, columns = modules.shape[:3]
    flat = modules.transpose(0, 1, 3, 2, 4, 5).reshape(n, rows * 8, columns * 8, 3)
    return flat.repeat(MODULE, axis=1).repeat(MODULE, axis=2)


def _texture(seed: int, rows: int, columns: int) -> np.ndarray:
    """A random patchwork of colours, `[1, rows * 16, columns * 16, 3]`."""
    rng = np.random.default_rng([seed, 1])
    modules = rng.integers(0, 256, size=(1, rows, columns, 2, 2, 3), dtype=np.uint8)
    return _enlarge(modules.repeat(4, axis=3).repeat(4, axis=4))


def pixels(frames: Sequence[Frame]) -> np.ndarray:
    """Pixels of frames of one kind and size, `[n, height, width, 3]` uint8."""
    kind = frames[0].kind
    if kind == "picture":
        rows, columns = len(frames[0].cells), len(frames[0].cells[0])
        return np.concatenate([_texture(frame.texture, rows, columns) for frame in frames])
    glyphs, colours, tags, targets = (
        np.array([frame.at_cells(name) for frame in frames]) for name in ("glyph", "colour", "tag", "target")
    )
    if kind == "rename":
        return paint(targets, colours, np.where(glyphs == BLANK, BLANK, glyphs + len(TAGS)))
    return paint(glyphs, colours, tags)
