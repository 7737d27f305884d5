"""What pictures and clips may cost before they become tokens."""

from __future__ import annotations

from dataclasses import dataclass

from kamera.errors import UnreadableMedia

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
