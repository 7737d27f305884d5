"""What pictures and clips may cost before they become tokens, and the sizes that chat items ask for.

`max_pixels` and related options have their meaning in qwen-vl-utils. Sides become multiples of a cell (the
pixels of one token: patch times merge), the aspect ratio is kept, the area stays within the bounds.
qwen-vl-utils itself is not called: its one module imports torchvision and requests at its top, and Kamera
runs without either. The rule is the function of transformers' own Qwen2-VL processor, which gives equal
sizes, but for a side under half a cell. Pillow resizes (bicubic), so that an item gives equal pixels
everywhere.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kamera.errors import UnreadableMedia, quote

_LEAST = 1 << 14
"""Pixels that a frame counts as, at least: it costs some time and memory, however small it is."""


@dataclass(frozen=True, kw_only=True)
class MediaLimits:
    """Most pixels and bytes; more is refused by name before it is decoded. Raises ValueError for one below 1.

    ``picture``: pixels of a picture, or of a frame, as its file has them (Pillow's own bound). One of more
    than ``decoded`` is decoded smaller: to the size that its processor uses, where that is known, else to so
    many.
    ``clip``: pixels of the frames that are taken of a video; ``video``: of all its frames, those between
    included. ``file``: bytes of a file. ``held``: bytes of processed pixels that a session or pool keeps;
    more are made again when they are asked for.
    """

    picture: int = 89_478_485
    decoded: int = 1 << 24
    clip: int = 1 << 30
    video: int = 1 << 38
    file: int = 1 << 28
    held: int = 1 << 28

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"limit of a {name} is {value!r}: give a whole number, 1 or more")

    def check_picture(self, size: tuple[int, int], name: str) -> None:
        """Raise UnreadableMedia for a picture or frame of too many pixels."""
        width, height = size
        if 0 in size:
            raise UnreadableMedia(f"{name} has {width} x {height} pixels: give one with pixels in it")
        if width * height > self.picture:
            raise UnreadableMedia(
                f"{name} has {width} x {height} pixels, more than {self.picture}: give a smaller one, or "
                "MediaLimits(picture=…)"
            )

    def check_clip(self, frames: int, size: tuple[int, int], name: str) -> None:
        """Raise UnreadableMedia for too many ``frames`` of this size to be held at once."""
        if frames * max(_LEAST, size[0] * size[1]) > self.clip:
            raise UnreadableMedia(
                f"{frames} frames of {size[0]} x {size[1]} pixels of {name}, more than {self.clip} in all: "
                "take fewer (fps, num_frames, max_frames, a part) or smaller ones (max_pixels), or give "
                "MediaLimits(clip=…)"
            )

    def check_video(self, frames: int, size: tuple[int, int], name: str) -> None:
        """Raise UnreadableMedia for a video of too many ``frames`` of this size to be decoded."""
        if frames * max(_LEAST, size[0] * size[1]) > self.video:
            raise UnreadableMedia(
                f"{name} has {frames} frames of {size[0]} x {size[1]} pixels, more than {self.video} in all: "
                "cut a part of it, or give MediaLimits(video=…)"
            )

    def check_file(self, size: int, name: str) -> None:
        """Raise UnreadableMedia for a file of too many bytes."""
        if size > self.file:
            raise UnreadableMedia(
                f"{name} has {size} bytes, more than {self.file}: give a smaller one, or MediaLimits(file=…)"
            )


DEFAULT_LIMITS = MediaLimits()


SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""The options of an image or video item that resize it."""

CELL = 28
"""Pixels along the side of a token of Qwen2-VL and Qwen2.5-VL."""

_LEAST_PIXELS = {"image": 4, "video": 128}  # tokens of a picture, of a frame: qwen-vl-utils' defaults
_MOST = {"image": 16384, "video": 768}


def sizes_of(item: Mapping[str, Any], kind: str) -> dict[str, int]:
    """The sizes that an item requests, by option. Raises UnreadableMedia for those that contradict."""
    sizes = {name: item[name] for name in SIZES if item.get(name) is not None}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise UnreadableMedia(f"{name} is {quote(value)}: give a positive whole number of pixels")
    sides = {"resized_height", "resized_width"} & sizes.keys()
    if sides and set(sizes) != {"resized_height", "resized_width"}:
        raise UnreadableMedia(
            f"{', '.join(sorted(sizes))}: give resized_height and resized_width together, or pixels alone"
        )
    low, high = pixel_bounds(sizes, kind, 1)
    if low > high:
        raise UnreadableMedia(f"min_pixels is {low}, more than max_pixels {high}: swap them")
    return sizes


def pixel_bounds(sizes: Mapping[str, int], kind: str, cell: int) -> tuple[int, int]:
    """Fewest and most pixels. A given bound also moves the default of the other if they would cross."""
    low = sizes.get("min_pixels", _LEAST_PIXELS[kind] * cell**2)
    high = sizes.get("max_pixels", _MOST[kind] * cell**2)
    if "min_pixels" not in sizes:
        low = min(low, high)
    if "max_pixels" not in sizes:
        high = max(low, high)
    return low, high


def size_of(
    given: tuple[int, int], sizes: Mapping[str, int], kind: str, cell: int = CELL
) -> tuple[int, int] | None:
    """Width and height that the item of a picture, or of a clip's frame, asks for; None if for none."""
    if not sizes:
        return None
    if "resized_height" in sizes:  # qwen-vl-utils: within a picture's bounds, whatever they are of
        height, width = sizes["resized_height"], sizes["resized_width"]
        bounds = pixel_bounds({}, "image", cell)
    else:
        width, height = given
        bounds = pixel_bounds(sizes, kind, cell)
    rows, columns = fit(height, width, cell, *bounds)
    return columns, rows


class Budget(NamedTuple):
    """The sizes that a processor makes of pictures: whole cells, ``least`` to ``most`` pixels."""

    cell: int
    least: int
    most: int

    def fit(self, width: int, height: int) -> tuple[int, int]:
        """Width and height that a picture gets."""
        rows, columns = fit(height, width, *self)
        return columns, rows


def budget_of(processor: Any) -> Budget | None:
    """The budget of a processor's pictures; None for one that has other rules."""
    cell, part = cell_of(processor, "image"), _part(processor, "image")
    size = dict(getattr(part, "size", None) or {})
    least, most = size.get("shortest_edge"), size.get("longest_edge")
    return Budget(cell, least, most) if cell and least and most else None


def fit(height: int, width: int, cell: int, least: int, most: int) -> tuple[int, int]:
    """Height and width in whole cells, of the same aspect ratio, with ``least`` to ``most`` pixels.

    A side is at least one cell, even beyond ``most``. Raises UnreadableMedia for a strip of a picture.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    try:
        rows, columns = smart_resize(height, width, cell, least, most)
    except ValueError:  # of one side 200 times as long as the other
        raise UnreadableMedia(
            f"a picture of {width} x {height} pixels is a strip: cut it into pieces"
        ) from None
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
