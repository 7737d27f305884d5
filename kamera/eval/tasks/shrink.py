"""Smaller pictures for every arm, before the processor's own resizing."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from PIL import Image

from kamera.content import Clip, load_image, read_video
from kamera.eval.tasks.sample import Part, Passage, Picture


@dataclass(frozen=True)
class Shrink:
    """Limits of ``max_pixels`` pixels and a longer side of ``image_size``; the aspect ratio is kept. Smaller
    pictures and frames do not change.
    """

    max_pixels: int | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: give a positive number of pixels")

    def apply(self, image: Image.Image) -> Image.Image:
        """The picture within the limits."""
        width, height = image.size
        share = 1.0
        if self.max_pixels is not None:
            share = min(share, math.sqrt(self.max_pixels / (width * height)))
        if self.image_size is not None:
            share = min(share, self.image_size / max(width, height))
        if share >= 1.0:
            return image
        smaller = (max(1, math.floor(width * share)), max(1, math.floor(height * share)))
        return image.resize(smaller, Image.Resampling.BICUBIC)

    def content(self, part: Part) -> dict[str, Any]:
        """A part as an item of a chat's content. Raises UnreadableMedia."""
        if isinstance(part, Passage):
            return {"type": "text", "text": part.text}
        if isinstance(part, Picture):
            image = load_image(part.source)
            return {"type": "image", "image": self.apply(_exchanged(image) if part.twin else image)}
        clip = part.source
        if not isinstance(clip, Clip):
            clip = read_video(clip, num_frames=part.num_frames, fps=part.fps)
        frames = map(_exchanged, clip.frames) if part.twin else clip.frames
        return {"type": "video", "video": replace(clip, frames=tuple(map(self.apply, frames)))}


def _exchanged(picture: Image.Image) -> Image.Image:
    red, green, blue = picture.split()
    return Image.merge("RGB", (blue, red, green))
