"""Pixel budgets of chat items: `max_pixels` and related options, with their meaning in qwen-vl-utils.

Sides become multiples of a cell (the pixels of one token: patch times merge), the aspect ratio is kept,
the area stays within the bounds. Pillow resizes (bicubic), so that an item gives equal pixels everywhere.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from kamera.errors import UnreadableMedia, quote

SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""The options of an image or video item that resize it."""

CELL = 28
"""Pixels along the side of a token of Qwen2-VL and Qwen2.5-VL."""

_LEAST = {"image": 4, "video": 128}  # tokens of a picture, of a frame: qwen-vl-utils' defaults
_MOST = {"image": 16384, "video": 768}
_LONGEST = 200  # times the shorter side


@dataclass(frozen=True)
class Sizing:
    """The size that an item requests for its picture, or for each of its frames."""

    kind: str  # "image" or "video"
    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None

    @classmethod
    def of(cls, item: Mapping[str, Any], kind: str) -> Sizing | None:
        """The sizing of an item, or None. Raises UnreadableMedia for contradictory or invalid sizes."""
        given = {name: item[name] for name in SIZES if item.get(name) is not None}
        if not given:
            return None
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise UnreadableMedia(f"{name} is {quote(value)}: give a positive whole number of pixels")
        sides = {"resized_height", "resized_width"} & given.keys()
        if sides and set(given) != {"resized_height", "resized_width"}:
            raise UnreadableMedia(
                f"{', '.join(sorted(given))}: give resized_height and resized_width together, or pixels alone"
            )
        sizing = cls(kind, **given)
        if sizing.bounds(1)[0] > sizing.bounds(1)[1]:
            raise UnreadableMedia(
                f"min_pixels is {sizing.min_pixels}, more than max_pixels {sizing.max_pixels}: swap them"
            )
        return sizing

    def bounds(self, cell: int) -> tuple[int, int]:
        """Fewest and most pixels. A given bound also moves the default of the other if they would cross."""
        low = self.min_pixels or _LEAST[self.kind] * cell**2
        high = self.max_pixels or _MOST[self.kind] * cell**2
        if self.min_pixels is None:
            low = min(low, high)
        if self.max_pixels is None:
            high = max(low, high)
        return low, high

    def apply(self, image: Image.Image, cell: int = CELL) -> Image.Image:
        """The picture in the requested size."""
        if self.resized_height and self.resized_width:
            sides = (self.resized_height, self.resized_width)
            height, width = (max(cell, round(side / cell) * cell) for side in sides)
        else:
            height, width = fit(image.height, image.width, cell, *self.bounds(cell))
        return image.resize((width, height))


def fit(height: int, width: int, cell: int, least: int, most: int) -> tuple[int, int]:
    """Height and width in whole cells, of the same aspect ratio, with ``least`` to ``most`` pixels.

    A side is at least one cell, even beyond ``most``. Raises UnreadableMedia for a strip of a picture.
    """
    if max(height, width) > _LONGEST * min(height, width):
        raise UnreadableMedia(f"a picture of {width} x {height} pixels is a strip: cut it into pieces")
    rows, columns = (max(cell, round(side / cell) * cell) for side in (height, width))
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(cell, math.floor(side / shrink / cell) * cell) for side in (height, width))
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / cell) * cell for side in (height, width))
    return rows, columns


def cell_of(processor: Any, kind: str) -> int | None:
    """Pixels along a side of a token of an "image" or "video"; None if the processor has no such part."""
    part = _part(processor, kind)
    patch, merge = getattr(part, "patch_size", None), getattr(part, "merge_size", None)
    return patch * merge if isinstance(patch, int) and isinstance(merge, int) else None


def check_sizes(processor: Any, items: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> None:
    """Raise UnreadableMedia if the processor resized an item again after it had its requested size."""
    for kind in ("image", "video"):
        of_kind = [i for i in items if i["type"] == kind]
        patch = getattr(_part(processor, kind), "patch_size", None)
        grids = made[f"{kind}_grid_thw"].tolist() if f"{kind}_grid_thw" in made else []
        for item, (_, rows, columns) in zip(of_kind, grids, strict=False):
            image = item[kind].frames[0] if kind == "video" else item[kind]
            if item["sized"] and (rows * patch, columns * patch) != (image.height, image.width):
                raise UnreadableMedia(
                    f"{kind} resized to {image.width} x {image.height} as asked, which the processor's own "
                    f"limits make {columns * patch} x {rows * patch}: ask for a size within them, or change "
                    "the processor's"
                )


def _part(processor: Any, kind: str) -> Any:
    pictures = getattr(processor, "image_processor", None)
    return (getattr(processor, "video_processor", None) or pictures) if kind == "video" else pictures
