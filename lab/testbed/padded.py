"""Frames that show, beside their facts, patchwork that says nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL.Image import Image, fromarray

from kamera.testbed.frames import BLANK, CELL, Frame, pixels


@dataclass(frozen=True)
class Padded(Frame):
    """A frame that shows the patchwork of its `texture` in half of the cells that state nothing."""

    @cached_property
    def image(self) -> Image:
        """The frame as an RGB picture, 16 pixels to a cell."""
        return fromarray(painted([self])[0])


def painted(frames: Sequence[Frame]) -> np.ndarray:
    """Pixels of frames of one kind and size, `[n, height, width, 3]` uint8; `Padded` ones with patchwork."""
    images = pixels(frames)
    for image, frame in zip(images, frames, strict=True):
        if isinstance(frame, Padded):
            cells = np.array(frame.cells)
            patchwork = pixels([Frame("picture", (), frame.cells, frame.texture)])[0]
            idle = (cells == BLANK) & (np.random.default_rng([frame.texture, 2]).random(cells.shape) < 0.5)
            at = idle.repeat(CELL, 0).repeat(CELL, 1)
            image[at] = patchwork[at]
    return images
