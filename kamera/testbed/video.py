"""Frames to an mp4 and back, with PyAV, so that pictures have the losses of a recording."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from .frames import Frame


def render_video(
    frames: Sequence[Frame | Image.Image], path: Path | str, fps: int = 4, hold: int = 2
) -> None:
    """Write the frames as H.264, each held for `hold` video frames.

    The canvas is as large as the largest frame; smaller ones are in its upper left corner. The sizes
    and `hold` go into the container's comment, from which `read_frames` restores the frames.
    """
    if not frames or hold < 1:
        raise ValueError(f"a video needs frames held at least once, got {len(frames)} and {hold}")
    images = [frame.image if isinstance(frame, Frame) else frame for frame in frames]
    width = max(image.width for image in images)
    height = max(image.height for image in images)
    settings = {"hold": hold, "sizes": [image.size for image in images]}
    with av.open(str(path), "w", format="mp4") as container:
        container.metadata["comment"] = json.dumps(settings)
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height = width + width % 2, height + height % 2
        stream.pix_fmt = "yuv444p"
        stream.options = {"crf": "12", "preset": "veryfast"}
        for image in images:
            canvas = Image.new("RGB", (stream.width, stream.height))
            canvas.paste(image, (0, 0))
            picture = np.asarray(canvas)
            for _ in range(hold):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def read_frames(path: Path | str) -> list[Image.Image]:
    """The pictures of a video as RGB.

    A video by `render_video` gives one picture per frame, in its own size; any other video all its
    pictures.
    """
    with av.open(str(path)) as container:
        comment = container.metadata.get("comment", "")
        images = [picture.to_image() for picture in container.decode(video=0)]
    try:
        settings = json.loads(comment)
        hold, sizes = settings["hold"], settings["sizes"]
    except (ValueError, KeyError, TypeError):
        return images
    return [image.crop((0, 0, *size)) for image, size in zip(images[hold - 1 :: hold], sizes, strict=True)]
