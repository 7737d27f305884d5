"""Clips: frames sampled from a video file or from a list of pictures."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kamera.content.media import check_options, load_image, local_path
from kamera.content.sizing import CELL, SIZES, cell_of, resize, sizes_of
from kamera.errors import UnreadableMedia, first_line, quote

_SAMPLING = ("fps", "nframes", "num_frames", "max_frames", "video_start", "video_end")
_DEFAULT_RATE = 2.0  # of a list of pictures, as in qwen-vl-utils


@dataclass(frozen=True, eq=False, repr=False)
class Clip:
    """Decoded frames of a video. ``seconds[i]`` is the presentation time of ``frames[i]``."""

    frames: tuple[Image.Image, ...]
    indices: tuple[int, ...]
    seconds: tuple[float, ...]
    fps: float
    total_frames: int

    @property
    def duration(self) -> float:
        """Length of the whole video in seconds."""
        return self.total_frames / self.fps

    def array(self) -> np.ndarray:
        """The frames, ``[frames, height, width, 3]``. Raises UnreadableMedia for frames of several sizes."""
        frames = [np.asarray(frame) for frame in self.frames]
        if len({frame.shape for frame in frames}) > 1:
            raise UnreadableMedia(f"{self!r} has frames of several sizes: give frames of one size")
        return np.stack(frames)

    def __repr__(self) -> str:
        sizes = sorted({f"{frame.width} x {frame.height}" for frame in self.frames})
        size = sizes[0] if len(sizes) == 1 else f"{len(sizes)} sizes"
        return (
            f"Clip({len(self.frames)} of {self.total_frames} frames, {size}, {self.duration:.4g} s at "
            f"{self.fps:.4g} fps)"
        )


@dataclass(frozen=True)
class FrameSampling:
    """Selection of frames: a part of the video in seconds, and a rate or a count.

    None selects all. Raises ValueError for values that are not positive numbers.
    """

    fps: float | None = None
    num_frames: int | None = None
    max_frames: int | None = None
    start: float | None = None
    end: float | None = None

    def __post_init__(self) -> None:
        if self.fps is not None and self.num_frames is not None:
            raise ValueError(f"give fps ({self.fps}) or num_frames ({self.num_frames}), not both")
        for name, count in (("num_frames", self.num_frames), ("max_frames", self.max_frames)):
            whole = _is_number(count) and isinstance(count, numbers.Integral)
            if count is not None and not (whole and count > 0):
                raise ValueError(f"{name} is {quote(count)}: must be positive, a whole number of frames")
        if self.fps is not None:
            check_rate(self.fps)
        for name, value in (("start", self.start), ("end", self.end)):
            if value is not None and not (_is_number(value) and value >= 0):
                raise ValueError(f"{name} is {quote(value)}: give seconds from the video's beginning")
        if self.start is not None and self.end is not None and self.start >= self.end:
            raise ValueError(f"start {self.start} is not before end {self.end}: swap them")

    def indices(self, total: int, rate: float) -> list[int]:
        """Indices of the sampled frames of ``total`` at ``rate`` frames per second."""
        first = 0 if self.start is None else math.ceil(self.start * rate)
        last = total - 1 if self.end is None else min(total - 1, math.floor(self.end * rate))
        if first > last:
            raise UnreadableMedia(
                f"no frame between {self.start or 0} s and "
                f"{'the end' if self.end is None else f'{self.end} s'} of a video of {total / rate:.4g} s: "
                "give a part of it"
            )
        count = total = last - first + 1
        if self.num_frames is not None:
            count = min(self.num_frames, total)
        elif self.fps is not None:
            count = max(1, min(total, round(total / rate * self.fps)))
        count = min(count, self.max_frames or count)
        return [first + i for i in np.linspace(0, total - 1, count).round().astype(int).tolist()]


def read_video(
    source: str | Path,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    max_frames: int | None = None,
    start: float | None = None,
    end: float | None = None,
) -> Clip:
    """Decode a video file with PyAV.

    All frames by default; ``fps`` takes frames at that rate, ``num_frames`` that many evenly spaced
    ones, ``max_frames`` caps either; ``start`` and ``end`` first select a part, in seconds. Raises
    UnreadableMedia, naming the file, and ValueError for invalid numbers.
    """
    import av

    sampling = FrameSampling(fps, num_frames, max_frames, start, end)
    path = local_path(source, "video")
    if not os.path.isfile(path):
        raise UnreadableMedia(f"no video at {quote(path)}: give an existing file")
    try:
        with av.open(str(path)) as container:
            if container.format.name == "image2" or container.format.name.endswith("_pipe"):
                raise UnreadableMedia(f"{quote(path)} is a picture, not a video: give it as an image")
            if not container.streams.video:
                raise UnreadableMedia(f"{quote(path)} holds no video stream")
            stream = container.streams.video[0]
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            times: list[float] = []
            for packet_frame in container.decode(stream):
                times.append(float(packet_frame.time or 0.0))
            if not times or rate <= 0:
                raise UnreadableMedia(f"{quote(path)} holds no decodable frame")
            indices = sampling.indices(len(times), rate)
            # A second pass keeps memory at the sampled frames only: long videos do not fit decoded.
            container.seek(0)
            keep = set(indices)
            pictures = {i: frame.to_image() for i, frame in enumerate(container.decode(stream)) if i in keep}
    except av.error.FFmpegError as error:
        raise UnreadableMedia(f"{quote(path)} cannot be decoded: {first_line(error)}") from None
    return Clip(
        frames=tuple(pictures[i] for i in indices),
        indices=tuple(indices),
        seconds=tuple(times[i] for i in indices),
        fps=rate,
        total_frames=len(times),
    )


def load_clip(item: Any, cell: int = CELL) -> Clip:
    """A clip from a chat item, a path, a `Clip`, or a sequence of pictures.

    A chat item may carry ``fps``, ``nframes`` / ``num_frames``, ``max_frames``, ``video_start`` and
    ``video_end`` (seconds), and `SIZES`, for each frame, in cells of ``cell`` pixels. For a
    list of pictures ``fps`` is their frame rate (default 2, as in qwen-vl-utils). Raises UnreadableMedia,
    for any other option too, and ValueError for invalid numbers.
    """
    if not isinstance(item, Mapping):
        return _clip(item, {})
    check_options(item, "video", (*_SAMPLING, *SIZES))
    sizes = sizes_of(item, "video")
    source = next((item[k] for k in ("video", "path", "url") if item.get(k) is not None), None)
    clip = _clip(source, {name: item[name] for name in _SAMPLING if item.get(name) is not None})
    return replace(clip, frames=tuple(resize(frame, sizes, "video", cell) for frame in clip.frames))


def load_media(item: Mapping[str, Any], processor: Any) -> Image.Image | Clip:
    """The picture or clip of a chat item, in the size that it requests, in the cells of a processor.

    Raises UnreadableMedia for sizes of an item whose processor has its own.
    """
    kind, sizes = item["type"], [name for name in SIZES if item.get(name) is not None]
    cell = cell_of(processor, kind)
    if sizes and cell is None:
        raise UnreadableMedia(
            f"{sizes} of {kind}: {type(processor).__name__} has sizes of its own, leave them out"
        )
    return load_image(item, cell or CELL) if kind == "image" else load_clip(item, cell or CELL)


def processor_media(images: Sequence[Image.Image], clips: Sequence[Clip]) -> dict[str, Any]:
    """Pictures and clips as arguments of a processor, which gives tensors and samples no frames."""
    arguments: dict[str, Any] = {"return_tensors": "pt"}
    if images:
        arguments["images"] = list(images)
    if clips:
        arguments["videos"] = [clip.array() for clip in clips]
        arguments["do_sample_frames"] = False
        arguments["video_metadata"] = [
            {
                "fps": clip.fps,
                "total_num_frames": clip.total_frames,
                "duration": clip.duration,
                "frames_indices": list(clip.indices),
            }
            for clip in clips
        ]
    return arguments


def check_rate(fps: Any) -> float:
    """A rate in frames per second as a float. Raises ValueError for one that is not positive and finite."""
    if not (_is_number(fps) and fps > 0):
        raise ValueError(f"fps is {quote(fps)}: must be positive and finite")
    return float(fps)


def _clip(source: Any, options: Mapping[str, Any]) -> Clip:
    if isinstance(source, Clip):
        if options:
            raise UnreadableMedia(f"{', '.join(options)} of a Clip: its frames are taken already")
        return source
    if "nframes" in options and "num_frames" in options:
        raise ValueError("give nframes or num_frames, not both")
    frame_options = {
        "num_frames": options.get("nframes", options.get("num_frames")),
        "max_frames": options.get("max_frames"),
        "start": options.get("video_start"),
        "end": options.get("video_end"),
    }
    if isinstance(source, str | Path):
        return read_video(source, fps=options.get("fps"), **frame_options)
    if isinstance(source, np.ndarray):
        source = list(source)
    if not isinstance(source, Sequence) or isinstance(source, bytes):
        raise UnreadableMedia(
            f"{type(source).__name__} is not a video: give a path, a list of pictures or an array"
        )
    if not source:
        raise UnreadableMedia("a clip of no frames: give at least one picture")
    rate = check_rate(options.get("fps", _DEFAULT_RATE))
    indices = FrameSampling(**frame_options).indices(len(source), rate)
    frames = tuple(load_image(source[i]) for i in indices)
    return Clip(frames, tuple(indices), tuple(i / rate for i in indices), rate, len(source))


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
