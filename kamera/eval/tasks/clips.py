"""A benchmark's video as clips, one per chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from kamera.content import Clip, read_video
from kamera.eval.tasks.letters import LetterTask
from kamera.eval.tasks.sample import Video


class VideoTask(LetterTask):
    """What the choice sets over videos share: ``subtasks`` of `offered`, and the sampling of frames.

    ``num_frames`` evenly spaced frames of a video, or those at ``fps``; 8 frames by default. They go into
    ``clips`` consecutive clips of equal length (to one frame). A video in one clip is one chunk without
    antecedents: all arms answer equally. Several clips are the chunks of a stream, each with all earlier ones
    as antecedents.
    """

    title: ClassVar[str]
    offered: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        subtasks: Sequence[str] | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        clips: int = 4,
    ) -> None:
        unknown = sorted(set(subtasks or ()) - set(self.offered))
        if unknown:
            raise ValueError(f"task {unknown} is none of {self.title}'s: {', '.join(self.offered)}")
        if num_frames is not None and fps is not None:
            raise ValueError(f"give num_frames ({num_frames}) or fps ({fps}), not both")
        for name, value in (("num_frames", num_frames), ("fps", fps), ("clips", clips)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: must be positive")
        self.subtasks = tuple(s for s in self.offered if s in (subtasks or self.offered[:1]))
        self.num_frames = 8 if num_frames is None and fps is None else num_frames
        self.fps, self.clips = fps, clips

    @property
    def settings(self) -> Mapping[str, Any]:
        """Sampling of frames, and the number of chunks."""
        return {"num_frames": self.num_frames, "fps": self.fps, "clips": self.clips}

    def read(self, path: Path) -> tuple[Video, ...]:
        """The clips of a video as parts, at most ``clips``. Raises UnreadableMedia, naming the file."""
        clips = split(read_video(path, num_frames=self.num_frames, fps=self.fps), self.clips)
        return tuple(Video(clip, len(clip.frames), self.fps) for clip in clips)


def split(clip: Clip, parts: int) -> tuple[Clip, ...]:
    """Consecutive clips whose lengths differ by at most one frame; at most one clip per frame.

    Times and indices stay those in the whole video. ``total_frames`` becomes the piece's share of it, which
    keeps the sampling rate, from which processors compute temporal positions.
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
