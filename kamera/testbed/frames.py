"""Frames of the synthetic world: the facts of one picture, or of its text twin.

A *legend* shows glyphs painted in colours. A *rename* replaces one glyph by another. An *items* frame shows
white glyphs, each with a two-digit tag. A *picture* is a distractor. Every kind except the picture has a text
twin that states the facts in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

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
    def image(self) -> Image:
        """The frame as an RGB picture, 16 pixels to a cell."""
        from .render import draw

        return draw(self)

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
        shown = rng.permutation(len(GLYPHS))[:SMALL_FACTS]
        if kind == "legend":
            stated = rng.integers(len(COLOURS), size=SMALL_FACTS)
            facts = [Fact(int(g), colour=int(c)) for g, c in zip(shown, stated, strict=True)]
        else:
            stated = (shown + rng.integers(1, len(GLYPHS), size=SMALL_FACTS)) % len(GLYPHS)
            facts = [Fact(int(g), target=int(t)) for g, t in zip(shown, stated, strict=True)]
    if letter.islower():
        return Frame(kind, tuple(facts))
    return Frame(kind, tuple(facts), place_facts(kind, len(facts), rng))


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
