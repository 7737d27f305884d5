"""Pictures and videos from where users keep them: files, arrays, PIL images, chat content items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from kamera.errors import UnreadableMedia

VIDEO_SUFFIXES = {".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".gif"}
_BUDGET = ("min_pixels", "max_pixels", "resized_height", "resized_width")


@dataclass(frozen=True, eq=False)
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


def load_image(source: Any) -> Image.Image:
    """An RGB picture from a PIL image, a path, a uint8 array ``[height, width, 3]``, or a chat item.

    Raises UnreadableMedia, naming the source.
    """
    if isinstance(source, Mapping):
        return _budgeted(source)
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if isinstance(source, np.ndarray):
        if source.ndim != 3 or source.shape[-1] != 3 or source.dtype != np.uint8:
            raise UnreadableMedia(
                f"array of shape {source.shape}, {source.dtype} is no picture: give uint8 [height, width, 3]"
            )
        return Image.fromarray(source)
    if isinstance(source, str | Path):
        path = Path(str(source).removeprefix("file://"))
        try:
            with Image.open(path) as image:
                return image.convert("RGB")
        except FileNotFoundError:
            raise UnreadableMedia(f"no image at {str(path)!r}: give an existing file") from None
        except (UnidentifiedImageError, OSError) as error:
            raise UnreadableMedia(f"{str(path)!r} cannot be read as an image: {error}") from None
    raise UnreadableMedia(f"{type(source).__name__} is no image: give a PIL image, a path or a uint8 array")


def read_video(
    source: str | Path,
    *,
    fps: float | None = None,
    num_frames: int | None = None,
    max_frames: int | None = None,
) -> Clip:
    """Decode a video file with PyAV.

    All frames by default; ``fps`` takes frames at that rate, ``num_frames`` that many evenly spaced
    ones, ``max_frames`` caps either. Raises UnreadableMedia, naming the file.
    """
    import av

    if fps is not None and num_frames is not None:
        raise ValueError(f"give fps ({fps}) or num_frames ({num_frames}), not both")
    for name, value in (("fps", fps), ("num_frames", num_frames), ("max_frames", max_frames)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} is {value}: must be positive")
    path = Path(str(source).removeprefix("file://"))
    if not path.is_file():
        raise UnreadableMedia(f"no video at {str(path)!r}: give an existing file")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise UnreadableMedia(f"{str(path)!r} holds no video stream")
            stream = container.streams.video[0]
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            times: list[float] = []
            for packet_frame in container.decode(stream):
                times.append(float(packet_frame.time or 0.0))
            if not times or rate <= 0:
                raise UnreadableMedia(f"{str(path)!r} holds no decodable frame")
            wanted = sample_indices(len(times), rate, fps, num_frames, max_frames)
            # A second pass keeps memory at the sampled frames only: long videos do not fit decoded.
            container.seek(0)
            keep = set(wanted)
            pictures = {i: frame.to_image() for i, frame in enumerate(container.decode(stream)) if i in keep}
    except av.error.FFmpegError as error:
        raise UnreadableMedia(f"{str(path)!r} cannot be decoded: {error}") from None
    return Clip(
        frames=tuple(pictures[i] for i in wanted),
        indices=tuple(wanted),
        seconds=tuple(times[i] for i in wanted),
        fps=rate,
        total_frames=len(times),
    )


def sample_indices(
    total: int,
    rate: float,
    fps: float | None,
    num_frames: int | None,
    max_frames: int | None,
) -> list[int]:
    """Indices of the frames to take out of ``total`` at ``rate`` frames per second."""
    if num_frames is not None:
        count = min(num_frames, total)
    elif fps is not None:
        count = max(1, min(total, round(total / rate * fps)))
    else:
        count = total
    if max_frames is not None:
        count = min(count, max_frames)
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def load_clip(item: Any) -> Clip:
    """A clip from a chat item, a path, or a sequence of pictures.

    A chat item may carry ``fps``, ``nframes`` / ``num_frames`` and ``max_frames``; for a list of
    pictures ``fps`` is the rate they were taken at (default 2, as qwen-vl-utils has it).
    """
    options: dict[str, Any] = {}
    source = item
    if isinstance(item, Mapping):
        source = next((item[k] for k in ("video", "path", "url") if k in item), None)
        options = {
            "fps": item.get("fps"),
            "num_frames": item.get("nframes", item.get("num_frames")),
            "max_frames": item.get("max_frames"),
        }
    if isinstance(source, str | Path):
        return read_video(source, **options)
    if isinstance(source, np.ndarray):
        source = list(source)
    if isinstance(source, Sequence):
        if not source:
            raise UnreadableMedia("a clip of no frames: give at least one picture")
        frames = tuple(load_image(f) for f in source)
        rate = float(options.get("fps") or 2.0)
        return Clip(
            frames,
            tuple(range(len(frames))),
            tuple(i / rate for i in range(len(frames))),
            rate,
            len(frames),
        )
    raise UnreadableMedia(f"{type(source).__name__} is no video: give a path, a list of pictures or an array")


def _budgeted(item: Mapping[str, Any]) -> Image.Image:
    source = next((item[k] for k in ("image", "path", "url") if item.get(k) is not None), None)
    image = load_image(source)
    if not any(item.get(k) is not None for k in _BUDGET):
        return image
    try:
        from qwen_vl_utils import fetch_image
    except Exception as error:  # a torchvision that does not fit torch raises more than ImportError
        raise UnreadableMedia(
            f"a resize budget ({[k for k in _BUDGET if k in item]}) needs qwen-vl-utils with a "
            f"torchvision that fits torch: pip install 'kamera[video]' ({error})"
        ) from None
    budget = {k: item[k] for k in _BUDGET if item.get(k) is not None}
    resized: Image.Image = fetch_image({"image": image, **budget})
    return resized
