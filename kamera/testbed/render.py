"""Frames as pixels: glyphs, colours and plates, 8 x 8 modules of 2 pixels to a cell.

Rows 0-4 of a cell hold a mirror-symmetric glyph, rows 6-7 a 16-module plate: an item's tag, or the
glyph that is renamed. Code words differ in at least five modules, so a decoded video still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from PIL import Image

from .frames import BLANK, GLYPHS, TAGS, Frame

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


def _code_words(bits: int, count: int, distance: int, weight: range) -> np.ndarray:
    """`count` words of `bits` bits, pairwise at least `distance` apart: `[count, bits]` bool."""
    order = np.random.default_rng(7).permutation(2**bits)
    words = (order[:, None] >> np.arange(bits)) & 1
    words = words[np.isin(words.sum(1), list(weight))]
    chosen = np.empty((0, bits), dtype=words.dtype)
    for word in words:
        if len(chosen) == 0 or (chosen != word).sum(1).min() >= distance:
            chosen = np.vstack([chosen, word])
        if len(chosen) == count:
            return chosen.astype(bool)
    raise ValueError(f"only {len(chosen)} of {count} words of {bits} bits are {distance} apart")


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


def draw(frame: Frame) -> Image.Image:
    """One frame as an RGB picture."""
    return Image.fromarray(pixels([frame])[0])
