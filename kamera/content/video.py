"""Clips: frames of a video file, of an animated picture, or of a list of pictures, at their true times."""

from __future__ import annotations

import io
import itertools
import math
import numbers
import os
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageSequence

from kamera.content.limits import (
    CELL,
    DEFAULT_LIMITS,
    SIZES,
    MediaLimits,
    budget_of,
    cell_of,
    size_of,
    sizes_of,
)
from kamera.content.media import (
    DAMAGE,
    Medium,
    bytes_of,
    check_options,
    load_image,
    local_path,
    moves,
    read_data_url,
    source_of,
)
from kamera.errors import UnreadableMedia, first_line, quote

SAMPLING = ("fps", "nframes", "num_frames", "max_frames", "video_start", "video_end")
"""The options of a video item that select frames."""

_DEFAULT_RATE = 2.0  # of a list of pictures, as in qwen-vl-utils
_UNKNOWN_RATE = 25.0  # of a raw stream that does not tell, as FFmpeg guesses
_MOST_PLACES = 1 << 22  # at which a rate looks for frames
_MOMENT = 1e-6  # seconds: times that differ by less are one
_TICK = 2e-3  # seconds: containers round times to a millisecond


@dataclass(frozen=True, eq=False, repr=False)
class Clip:
    """Decoded frames of a video. ``seconds[i]`` is the presentation time of ``frames[i]``.

    ``fps`` is the rate of the whole video, an average where it varies; ``start`` the time of its first frame.
    """

    frames: tuple[Image.Image, ...]
    indices: tuple[int, ...]
    seconds: tuple[float, ...]
    fps: float
    total_frames: int
    start: float = 0.0

    @property
    def duration(self) -> float:
        """Length of the whole video in seconds."""
        return self.total_frames / self.fps

    @property
    def places(self) -> list[float]:
        """The frames' places in a video of constant ``fps``: ``places[i] / fps`` is the time from ``start``.

        Their indices, if the rate is constant.
        """
        true = [(second - self.start) * self.fps for second in self.seconds]
        even = all(abs(a - b) <= _TICK * self.fps for a, b in zip(true, self.indices, strict=True))
        return list(self.indices) if even else true

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

    def indices(self, times: Sequence[float], end: float) -> list[int]:
        """Indices of the sampled ones of frames at ``times``, in seconds, of a video that ends at ``end``.

        Frames are taken at even times from the first of the part to its last, each the one nearest. So a rate
        takes a frame that stands for long once; a count takes as many frames as it says, if there are.
        """
        low = -math.inf if self.start is None else self.start - _MOMENT
        high = math.inf if self.end is None else self.end + _MOMENT
        part = [i for i, time in enumerate(times) if low <= time <= high]
        if not part:
            raise UnreadableMedia(
                f"no frame between {self.start or 0} s and "
                f"{'the end' if self.end is None else f'{self.end} s'} of a video from {times[0]:.4g} s to "
                f"{end:.4g} s: give a part of it"
            )
        count = len(part)
        if self.fps is not None:
            after = times[part[-1] + 1] if part[-1] + 1 < len(times) else end
            count = max(1, round(min((after - times[part[0]]) * self.fps, _MOST_PLACES)))
        elif self.num_frames is not None:
            count = min(self.num_frames, count)
        count = min(count, self.max_frames or count)
        places = _nearest(np.array([times[i] for i in part]), count, distinct=self.fps is None)
        return [part[i] for i in places]


def _nearest(times: np.ndarray, count: int, *, distinct: bool) -> list[int]:
    """Indices of the frames nearest to ``count`` even times, the even index of two that are as near."""
    if distinct and count == len(times):
        return [*range(count)]
    order = np.argsort(times, kind="stable")
    sorted_times = times[order]
    wanted = np.linspace(times[0], times[-1], count)
    upper = np.clip(np.searchsorted(sorted_times, wanted), min(1, len(times) - 1), len(times) - 1)
    nearer = (sorted_times[upper] - wanted) - (wanted - sorted_times[upper - 1])
    takes_upper = (nearer < -_MOMENT) | ((np.abs(nearer) <= _MOMENT) & (upper % 2 == 0))
    places = order[np.where(takes_upper, upper, upper - 1)].tolist()
    if not distinct:
        return sorted(set(places))
    out: list[int] = []
    for number, place in enumerate(sorted(places)):  # each once, and as many are left for those behind
        out.append(max(place, out[-1] + 1 if out else 0))
        out[-1] = min(out[-1], len(times) - count + number)
    return out


# -- files -----------------------------------------------------------------------------------------


def read_video(
    source: Any,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    max_frames: int | None = None,
    start: float | None = None,
    end: float | None = None,
    limits: MediaLimits = DEFAULT_LIMITS,
) -> Clip:
    """Decode a video file with PyAV, or an animated picture (GIF, WebP, APNG) with Pillow.

    ``source`` is a path, a file's bytes, or an open file. All frames by default; ``fps`` takes frames at that
    rate, ``num_frames`` that many evenly spaced ones, ``max_frames`` caps either; ``start`` and ``end`` first
    select a part, in seconds. Times are the file's own, of each frame, whether its rate is constant or not. A
    rotation or a mirror in the header is applied. Raises UnreadableMedia, naming the file, also for more than
    ``limits``, and ValueError for invalid numbers.
    """
    return _read(source, FrameSampling(fps, num_frames, max_frames, start, end), limits)


Shrink = Callable[[tuple[int, int]], "tuple[int, int] | None"]
"""From the width and height of a frame to those that it gets; None leaves it."""


def _read(
    source: Any, sampling: FrameSampling, limits: MediaLimits, shrink: Shrink | None = None, name: str = ""
) -> Clip:
    import av

    file: Path | io.BytesIO
    if isinstance(source, str) and source[:5].lower() == "data:":
        source = read_data_url(source, "video")
    if isinstance(source, bytes | bytearray | memoryview) or hasattr(source, "read"):
        data = bytes_of(source, limits)
        name, file = name or f"{len(data)} bytes", io.BytesIO(data)
    else:
        file = local_path(source, "video")
        name = quote(file)
        if not os.path.isfile(file):  # of a name too long for a file Path.is_file raises
            raise UnreadableMedia(f"no video at {name}: give an existing file")
    try:
        opened = _Animation(file, name) if moves(file) else _Stream(file, name)
        return _sample(opened, sampling, limits, shrink or (lambda size: None))
    except UnreadableMedia:
        raise
    except (av.error.FFmpegError, *DAMAGE) as error:
        raise UnreadableMedia(f"{name} cannot be decoded: {first_line(error)}") from None


class _Frame(NamedTuple):
    """A frame that is decoded: the ``time`` when it comes and when it ends, and its size."""

    time: float | None
    length: float
    size: tuple[int, int]
    picture: Callable[[], Image.Image]


def _sample(
    video: _Animation | _Stream, sampling: FrameSampling, limits: MediaLimits, shrink: Shrink
) -> Clip:
    """The sampled frames of a video. Those between are decoded, too, and let go."""
    times, length, size = video.outline()
    limits.check_picture(size, video.name)
    limits.check_video(len(times), size, video.name)
    indices = sampling.indices(times, times[-1] + length) if times else []
    while True:
        limits.check_clip(len(indices), shrink(size) or size, video.name)
        found, length, frames = _decode(video, set(indices), limits, shrink)
        if not found:
            raise UnreadableMedia(f"{video.name} holds no decodable frame")
        if found == times:
            break
        # the decoder gives other frames than the container tells of: these count
        before, times = indices, found
        indices = sampling.indices(times, times[-1] + length)
        if indices == before:
            break
    even = video.rate and all(abs(t - times[0] - i / video.rate) <= _TICK for i, t in enumerate(times))
    return Clip(
        frames=tuple(frames[i] for i in indices),
        indices=tuple(indices),
        seconds=tuple(times[i] for i in indices),
        fps=video.rate if even else len(times) / (times[-1] + length - times[0]),
        total_frames=len(times),
        start=times[0],
    )


def _decode(
    video: _Animation | _Stream, wanted: Collection[int], limits: MediaLimits, shrink: Shrink
) -> tuple[list[float], float, dict[int, Image.Image]]:
    """The times of all frames, the length of the last, and the wanted ones by their indices."""
    times, length, pictures = list[float](), 0.0, dict[int, Image.Image]()
    for i, frame in enumerate(video.frames()):
        limits.check_picture(frame.size, video.name)  # it may change within a file
        limits.check_video(i + 1, frame.size, video.name)
        # a raw stream has no times
        times.append(i / (video.rate or _UNKNOWN_RATE) if frame.time is None else frame.time)
        length = frame.length
        if i in wanted:
            pictures[i] = _shrunk(frame.picture(), shrink)
    return times, _length_of_last(times, length, video.rate), pictures


def _length_of_last(times: Sequence[float], length: float, rate: float) -> float:
    """Seconds that the last frame stands for: as its file says, where it says what can be."""
    gaps = [b - a for a, b in itertools.pairwise(times)]
    if 0 < length <= max([*gaps, 1 / rate if rate else 0.0]) + _TICK or not times:
        return length
    return 1 / rate if rate else (times[-1] - times[0]) / max(1, len(times) - 1) or 1.0


class _Stream:
    """The video stream of a file, as PyAV reads it."""

    def __init__(self, file: Path | io.BytesIO, name: str) -> None:
        self.file, self.name, self.rate = file, name, 0.0

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        import av

        if isinstance(self.file, io.BytesIO):
            self.file.seek(0)
        with av.open(str(self.file) if isinstance(self.file, Path) else self.file) as container:
            if container.format.name == "image2" or container.format.name.endswith("_pipe"):
                raise UnreadableMedia(f"{self.name} is a picture, not a video: give it as an image")
            if not container.streams.video:
                raise UnreadableMedia(f"{self.name} holds no video stream")
            yield container, container.streams.video[0]

    def outline(self) -> tuple[list[float], float, tuple[int, int]]:
        """Times of the frames and length of the last, as packets tell, none if they do not; their size."""
        with self._open() as (container, stream):
            self.rate = float(stream.average_rate or stream.guessed_rate or 0)
            size = stream.width, stream.height
            packets = [
                (p.pts, p.duration or 0) for p in container.demux(stream) if p.size and not p.is_discard
            ]
            if not packets or any(pts is None for pts, _ in packets):
                return [], 0.0, size
            packets.sort()
            tick = stream.time_base
        times = [float(pts * tick) for pts, _ in packets]
        return times, _length_of_last(times, float(packets[-1][1] * tick), self.rate), size

    def frames(self) -> Iterator[_Frame]:
        """All frames, in the order in which they are shown."""
        with self._open() as (container, stream):
            for frame in container.decode(stream):
                length = float((frame.duration or 0) * (frame.time_base or 0))
                yield _Frame(frame.time, length, (frame.width, frame.height), partial(_upright, frame))


def _upright(frame: Any) -> Image.Image:
    """A frame of PyAV as it is to be shown: its header may turn and mirror it."""
    picture: Image.Image = frame.to_image()
    data = frame.side_data.get("DISPLAYMATRIX")
    if data is None:
        return picture
    a, b, _, c, d = struct.unpack_from("5i", bytes(data))  # x' = ax + cy, y' = bx + dy, in 16.16
    signs = (a > 0, d > 0) if abs(a) > abs(b) else (b > 0, c > 0)
    turn = (_ALONG if abs(a) > abs(b) else _ACROSS)[signs]
    return picture if turn is None else picture.transpose(turn)


_T = Image.Transpose
_ALONG = {
    (True, True): None,
    (True, False): _T.FLIP_TOP_BOTTOM,
    (False, True): _T.FLIP_LEFT_RIGHT,
    (False, False): _T.ROTATE_180,
}
_ACROSS = {
    (True, True): _T.TRANSPOSE,
    (True, False): _T.ROTATE_270,
    (False, True): _T.ROTATE_90,
    (False, False): _T.TRANSVERSE,
}


class _Animation:
    """An animated picture, as Pillow reads it."""

    rate = 0.0

    def __init__(self, file: Path | io.BytesIO, name: str) -> None:
        self.file, self.name = file, name

    def outline(self) -> tuple[list[float], float, tuple[int, int]]:
        """As of `_Stream`; times are known once it is decoded."""
        with Image.open(self.file) as image:
            return [], 0.0, image.size

    def frames(self) -> Iterator[_Frame]:
        """All frames."""
        time = 0.0
        with Image.open(self.file) as image:
            for number, frame in enumerate(ImageSequence.Iterator(image)):
                if number == 0 and image.info.get("default_image"):
                    continue  # of an APNG, for readers that show one
                frame.load()  # WebP tells its length then
                length = frame.info.get("duration", 0) / 1000
                length = length if length >= _SHORTEST else _UNTIMED
                yield _Frame(time, length, frame.size, partial(frame.convert, "RGB"))
                time += length


_SHORTEST, _UNTIMED = 0.02, 0.1  # seconds: as FFmpeg and browsers read the delay of a GIF's frame


# -- items -----------------------------------------------------------------------------------------


def load_clip(item: Any, cell: int = CELL, *, limits: MediaLimits = DEFAULT_LIMITS) -> Clip:
    """A clip from a chat item, a file as `read_video` takes it, a `Clip`, or a sequence of pictures.

    A chat item may carry ``fps``, ``nframes`` / ``num_frames``, ``max_frames``, ``video_start`` and
    ``video_end`` (seconds), and `SIZES`, for each frame, in cells of ``cell`` pixels. For a
    list of pictures ``fps`` is their frame rate (default 2, as in qwen-vl-utils). Raises UnreadableMedia,
    for any other option too, and ValueError for invalid numbers.
    """
    if not isinstance(item, Mapping):
        return _clip(item, {}, limits, lambda size: None)
    check_options(item, "video", (*SAMPLING, *SIZES))
    sizes = sizes_of(item, "video")
    options = {name: item[name] for name in SAMPLING if item.get(name) is not None}
    return _clip(source_of(item, "video"), options, limits, lambda size: size_of(size, sizes, "video", cell))


def load_media(
    item: Mapping[str, Any], processor: Any, limits: MediaLimits = DEFAULT_LIMITS
) -> Image.Image | Clip:
    """The picture or clip of a chat item, in the size that it requests, in the cells of a processor.

    Raises UnreadableMedia for sizes of an item whose processor has its own.
    """
    kind, sizes = item["type"], [name for name in SIZES if item.get(name) is not None]
    cell = cell_of(processor, kind)
    if sizes and cell is None:
        raise UnreadableMedia(
            f"{sizes} of {kind}: {type(processor).__name__} has sizes of its own, leave them out"
        )
    if kind == "image":
        return load_image(item, cell or CELL, limits=limits, budget=budget_of(processor))
    return load_clip(item, cell or CELL, limits=limits)


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
                "frames_indices": clip.places,
            }
            for clip in clips
        ]
    return arguments


def check_rate(fps: Any) -> float:
    """A rate in frames per second as a float. Raises ValueError for one that is not positive and finite."""
    if not (_is_number(fps) and fps > 0):
        raise ValueError(f"fps is {quote(fps)}: must be positive and finite")
    return float(fps)


def _clip(source: Any, options: Mapping[str, Any], limits: MediaLimits, shrink: Shrink) -> Clip:
    name = ""
    if isinstance(source, Medium):
        source, name = source.held, source.name
    if isinstance(source, Clip):
        if options:
            raise UnreadableMedia(f"{', '.join(options)} of a Clip: its frames are taken already")
        return replace(source, frames=tuple(_shrunk(frame, shrink) for frame in source.frames))
    if "nframes" in options and "num_frames" in options:
        raise ValueError("give nframes or num_frames, not both")
    frame_options = {
        "num_frames": options.get("nframes", options.get("num_frames")),
        "max_frames": options.get("max_frames"),
        "start": options.get("video_start"),
        "end": options.get("video_end"),
    }
    if isinstance(source, str | Path | bytes | bytearray | memoryview) or hasattr(source, "read"):
        sampling = FrameSampling(fps=options.get("fps"), **frame_options)
        return _read(source, sampling, limits, shrink, name)
    if isinstance(source, np.ndarray | torch.Tensor):
        source = list(source)
    if not isinstance(source, Sequence):
        raise UnreadableMedia(
            f"{type(source).__name__} is not a video: give a path, a list of pictures or an array"
        )
    if not source:
        raise UnreadableMedia("a clip of no frames: give at least one picture")
    rate = check_rate(options.get("fps", _DEFAULT_RATE))
    sampling, times = FrameSampling(**frame_options), [i / rate for i in range(len(source))]
    indices = sampling.indices(times, len(source) / rate)
    frames = list[Image.Image]()
    for i in indices:
        frames.append(_shrunk(load_image(source[i], limits=limits), shrink))
        limits.check_clip(len(indices), frames[-1].size, "a clip")
    return Clip(tuple(frames), tuple(indices), tuple(times[i] for i in indices), rate, len(source))


def _shrunk(frame: Image.Image, shrink: Shrink) -> Image.Image:
    size = shrink(frame.size)
    return frame if size in (None, frame.size) else frame.resize(size)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
