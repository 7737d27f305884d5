"""A benchmark's video as the clips that become chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kamera.content import Clip, read_video
from kamera.eval.tasks.sample import Video


@dataclass(frozen=True)
class Sampling:
    """Which frames of a video are shown, and as how many clips.

    ``num_frames`` evenly spaced ones, or those at ``fps``; 8 frames where neither is given. The frames
    go into ``clips`` consecutive clips of equal length (to one frame). A video in one clip is one
    chunk with nothing before it: all arms answer alike. Several clips are the chunks of a stream,
    each the antecedent of those behind it.
    """

    num_frames: int | None = None
    fps: float | None = None
    clips: int = 4

    def __post_init__(self) -> None:
        if self.num_frames is not None and self.fps is not None:
            raise ValueError(f"give num_frames ({self.num_frames}) or fps ({self.fps}), not both")
        for name in ("num_frames", "fps", "clips"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: must be positive")

    @property
    def settings(self) -> dict[str, Any]:
        """What is shown, as `Sampling` takes it."""
        return {"num_frames": self._count, "fps": self.fps, "clips": self.clips}

    @property
    def _count(self) -> int | None:
        return 8 if self.num_frames is None and self.fps is None else self.num_frames

    def read(self, path: Path) -> tuple[Clip, ...]:
        """The clips of the video, at most ``clips``. Raises UnreadableMedia, naming the file."""
        return split(read_video(path, num_frames=self._count, fps=self.fps), self.clips)

    def parts(self, clips: Sequence[Clip]) -> tuple[Video, ...]:
        """The clips as parts of a prompt, with what they were sampled by beside them."""
        return tuple(Video(clip, len(clip.frames), self.fps) for clip in clips)


def split(clip: Clip, parts: int) -> tuple[Clip, ...]:
    """Consecutive clips whose lengths differ by at most one frame; fewer where frames are fewer.

    Times and indices stay those in the whole video. ``total_frames`` becomes the piece's share of it,
    so that the rate the frames were sampled at, from which processors space temporal positions, stays.
    """
    count = len(clip.frames)
    parts = min(parts, count)
    edges = [i * count // parts for i in range(parts + 1)]
    return tuple(
        Clip(
            frames=clip.frames[a:b],
            indices=clip.indices[a:b],
            seconds=clip.seconds[a:b],
            fps=clip.fps,
            total_frames=round(clip.total_frames * (b - a) / count),
        )
        for a, b in pairwise(edges)
    )


def find_video(folder: Path, name: str, suffixes: Sequence[str]) -> Path | None:
    """The first of ``folder/name + suffix`` that is a file."""
    return next((p for s in suffixes if (p := folder / f"{name}{s}").is_file()), None)
