"""A benchmark's video as clips, one per chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kamera.content import Clip, read_video
from kamera.errors import UnreadableMedia
from kamera.eval.tasks.letters import LetterTask
from kamera.eval.tasks.sample import Problem, TaskSample, Video

SUFFIXES = (".mp4", ".MP4", ".mkv")


class VideoTask(LetterTask):
    """What the choice sets over videos share: the sampling of frames; by default the first subtask is asked.

    ``num_frames`` evenly spaced frames of a video, or those at ``fps``; 8 frames by default. They go into
    ``clips`` consecutive clips of equal length (to one frame). A video in one clip is one chunk without
    antecedents: all arms answer equally. Several clips are the chunks of a stream, each with all earlier ones
    as antecedents.
    """

    def __init__(
        self,
        subtasks: Sequence[str] | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        clips: int = 4,
    ) -> None:
        super().__init__(subtasks or self.offered[:1])
        if num_frames is not None and fps is not None:
            raise ValueError(f"give num_frames ({num_frames}) or fps ({fps}), not both")
        for name, value in (("num_frames", num_frames), ("fps", fps), ("clips", clips)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: must be positive")
        self.num_frames = 8 if num_frames is None and fps is None else num_frames
        self.fps, self.clips = fps, clips
        self._last: tuple[str, tuple[Video, ...]] = ("", ())  # a video's questions are consecutive

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"num_frames": self.num_frames, "fps": self.fps, "clips": self.clips}

    def with_media(self, sample: TaskSample) -> Iterator[TaskSample | Problem]:
        """The sample with the clips of its video, of which `files` gives the path without its suffix."""
        (video,) = sample.parts
        assert isinstance(video, Video), "a sample of a choice set over videos shows one"
        if self._last[0] != video.source:
            path = next((p for s in SUFFIXES if (p := Path(f"{video.source}{s}")).is_file()), None)
            if path is None:
                yield Problem(sample.where, f"no video {video.source} with any of {', '.join(SUFFIXES)}")
                return
            try:
                clip = read_video(path, num_frames=self.num_frames, fps=self.fps)
            except UnreadableMedia as error:
                yield Problem(sample.where, str(error))
                return
            clips = (Video(clip, len(clip.frames), self.fps) for clip in split(clip, self.clips))
            self._last = (video.source, tuple(clips))
        yield replace(sample, parts=self._last[1])


def split(clip: Clip, parts: int) -> tuple[Clip, ...]:
    """Consecutive clips whose lengths differ by at most one frame; at most one clip per frame.

    Times and indices stay those in the whole video. ``total_frames`` becomes the piece's share of it, which
    keeps the sampling rate, from which processors compute temporal positions.
    """
    count = len(clip.frames)
    parts = min(parts, count)
    edges = [i * count // parts for i in range(parts + 1)]
    return tuple(
        replace(
            clip,
            frames=clip.frames[a:b],
            indices=clip.indices[a:b],
            seconds=clip.seconds[a:b],
            total_frames=round(clip.total_frames * (b - a) / count),
        )
        for a, b in pairwise(edges)
    )
