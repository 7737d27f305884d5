"""Training windows of any size: small ones to begin with, full ones of the world, pictures of many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kamera.testbed.frames import BLANK, COLOURS, GLYPHS, TAGS, Fact, Frame
from kamera.testbed.world import Episode
from lab.testbed.regimes import draw_again

from ..padded import Padded

ABOUT_SHOWN = 0.75
"""Of a small items frame's glyphs, the share that a legend before it shows."""


@dataclass(frozen=True)
class Size:
    """Legends of `legend` x `legend` cells with `facts` facts, items frames of `items` x `items` cells.

    Items fill `side` x `side` cells each, `shown` of them at most. Facts of a legend fill the share `told` of
    its cells. Frames with `padded` show patchwork, which says nothing, in half of the cells that are left.
    """

    legend: int
    facts: int
    items: int
    side: int = 2
    shown: int = len(TAGS)
    told: float = 1.0
    padded: bool = False


SMALL = Size(4, 5, 6)
MEDIUM = Size(16, 12, 16, shown=54, told=0.5, padded=True)
"""Pictures of 256 tokens."""
WIDE = Size(24, 12, 24, side=2, shown=54, told=0.5, padded=True)
"""Of 576: on the way to `LARGE`."""
LARGE = Size(38, 12, 38, side=4, shown=54, told=0.5, padded=True)
"""Of 1,444: as many as a screenshot has."""


def episode(rng: np.random.Generator, layout: str, size: Size | None) -> Episode:
    """An episode of this layout; `size` None is the world's own."""
    frames: list[Frame] = []
    tags = rng.permutation(len(TAGS))
    for letter in layout:
        if size is None:
            frames.append(draw_again(letter, frames, None, rng, tags))
        else:
            frames.append(_legend(rng, size) if letter == "L" else _items(rng, size, frames, tags))
        tags = tags[len(frames[-1].glyph_of) :]
    return Episode(tuple(frames), 0)


def _legend(rng: np.random.Generator, size: Size) -> Frame:
    glyphs = rng.permutation(len(GLYPHS))[: size.facts]
    colours = rng.integers(len(COLOURS), size=size.facts)
    facts = tuple(Fact(int(g), colour=int(c)) for g, c in zip(glyphs, colours, strict=True))
    cells = np.full(size.legend**2, BLANK)
    repeat = int(size.told * len(cells)) // size.facts
    cells[: repeat * size.facts] = np.repeat(np.arange(size.facts), repeat)
    return _frame("legend", facts, rng.permutation(cells).reshape(size.legend, size.legend), size, rng)


def _items(rng: np.random.Generator, size: Size, before: list[Frame], tags: np.ndarray) -> Frame:
    across = size.items // size.side
    slots = across**2
    shown = np.array(sorted({glyph for frame in before for glyph in frame.colour_of}) or range(len(GLYPHS)))
    glyphs = np.where(
        rng.random(slots) < ABOUT_SHOWN, rng.choice(shown, slots), rng.integers(len(GLYPHS), size=slots)
    )
    facts = tuple(Fact(int(g), tag=int(t)) for g, t in zip(glyphs[: size.shown], tags, strict=False))
    order = rng.permutation(slots).reshape(across, across)
    cells = np.full((size.items, size.items), BLANK)
    filled = np.kron(order, np.ones((size.side, size.side), dtype=int))
    cells[: len(filled), : len(filled)] = np.where(filled < len(facts), filled, BLANK)
    return _frame("items", facts, cells, size, rng)


def _frame(
    kind: str, facts: tuple[Fact, ...], cells: np.ndarray, size: Size, rng: np.random.Generator
) -> Frame:
    grid = tuple(map(tuple, cells.tolist()))
    if not size.padded:
        return Frame(kind, facts, grid)
    return Padded(kind, facts, grid, texture=int(rng.integers(2**31)))
