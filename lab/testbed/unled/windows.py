"""Training windows: small ones to begin with, and full ones of the world."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kamera.testbed.frames import COLOURS, GLYPHS, TAGS, Fact, Frame
from kamera.testbed.regimes import draw_again
from kamera.testbed.world import Episode

ABOUT_SHOWN = 0.75
"""Of a small items frame's glyphs, the share that a legend before it shows."""


@dataclass(frozen=True)
class Size:
    """Legends of `legend` x `legend` cells with `facts` facts, items frames of `items` x `items` cells."""

    legend: int
    facts: int
    items: int


SMALL = Size(4, 5, 6)


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
    cells = np.full(size.legend**2, -1)
    repeat = len(cells) // size.facts
    cells[: repeat * size.facts] = np.repeat(np.arange(size.facts), repeat)
    return Frame("legend", facts, _grid(rng.permutation(cells).reshape(size.legend, size.legend)))


def _items(rng: np.random.Generator, size: Size, before: list[Frame], tags: np.ndarray) -> Frame:
    slots = (size.items // 2) ** 2
    shown = np.array(sorted({glyph for frame in before for glyph in frame.colour_of}) or range(len(GLYPHS)))
    glyphs = np.where(
        rng.random(slots) < ABOUT_SHOWN, rng.choice(shown, slots), rng.integers(len(GLYPHS), size=slots)
    )
    facts = tuple(Fact(int(g), tag=int(t)) for g, t in zip(glyphs, tags, strict=False))
    side = size.items // 2
    order = rng.permutation(slots).reshape(side, side)
    return Frame("items", facts, _grid(np.kron(order, np.ones((2, 2), dtype=int))))


def _grid(cells: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, cells.tolist()))
