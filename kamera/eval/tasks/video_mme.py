"""Video-MME: multiple-choice questions over videos of seconds to an hour, without and with subtitles.

Layout: ``videomme/test-00000-of-00001.parquet``, ``data/{videoID}.mp4`` (.MP4, .mkv) and
``subtitle/{videoID}.srt`` of the Hugging Face set, its archives unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError, UnreadableMedia
from kamera.eval.tasks.clips import VideoTask, find_video
from kamera.eval.tasks.letters import first_abcd
from kamera.eval.tasks.sample import Answered, Cell, Problem, Summary, TaskSample, Video, Wanted, every, mean
from kamera.eval.tasks.set_files import rows, write_json
from kamera.eval.tasks.subtitles import on_screen, read_srt

SETTINGS = ("without-subtitles", "with-subtitles")
DURATIONS = ("short", "medium", "long")
SUFFIXES = (".mp4", ".MP4", ".mkv")

_OF_VIDEO = ("video_id", "duration", "domain", "sub_category")
_TEXTS = (*_OF_VIDEO, "videoID", "question_id", "task_type", "question", "answer")
_GROUPED_BY = ("duration", "domain", "sub_category", "task_type")
_ASK = (
    "Select the best answer to the following multiple-choice question based on the video. "
    "Respond with only the letter (A, B, C, or D) of the correct option."
)


class VideoMME(VideoTask):
    """``subtasks`` are of `SETTINGS` (default: without subtitles); the rest as in `VideoTask`."""

    name = "video-mme"
    title = "Video-MME"
    offered = SETTINGS

    def load(
        self, data: Path, limit: int | None = None, wanted: Wanted = every
    ) -> Iterator[TaskSample | Problem]:
        """Every question once per setting, ``limit`` questions at most. See `Task.load`."""
        table = data / "videomme" / "test-00000-of-00001.parquet"
        if not table.is_file():
            raise TaskDataError(f"{table}: no such file: give the Video-MME folder as published")
        if "with-subtitles" in self.subtasks and not (data / "subtitle").is_dir():
            raise TaskDataError(f"{data / 'subtitle'}: no such folder: unpack subtitle.zip")
        seen: set[str] = set()
        shown: tuple[str, tuple[Video, ...] | str] = ("", ())  # a video's questions are consecutive
        for number, row in rows(table, (*_TEXTS, "options")):
            if limit is not None and len(seen) >= limit:
                return
            where = f"{table}:row {number}"
            bad = _row_error(row) or ("question_id occurs twice" if row["question_id"] in seen else "")
            if bad:
                yield Problem(where, bad)
                continue
            seen.add(row["question_id"])
            chosen = [setting for setting in self.subtasks if wanted(_id(setting, row))]
            if not chosen:
                continue
            if shown[0] != row["videoID"]:
                shown = (row["videoID"], self._video(data / "data", row["videoID"]))
            if isinstance(shown[1], str):
                yield Problem(where, shown[1])
                continue
            for setting in chosen:
                yield from self._samples(row, shown[1], setting, data / "subtitle", where)

    def letter(self, response: str, sample: TaskSample) -> str | None:
        """The first capital A to D."""
        return first_abcd(response)

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        """Official: correct per answered, as in the benchmark's own script; ``mean`` is over all samples.

        Overall and by duration, domain, sub-category and task type, for each setting; a response without a
        letter counts as unanswered.
        """
        labelled = [a for a in answered if a.score is not None]
        scored = [(a.sample, float(a.score or 0.0)) for a in labelled]
        read = [pair for a, pair in zip(labelled, scored, strict=True) if first_abcd(a.response) is not None]
        groups: list[Cell] = []
        for setting in SETTINGS:
            asked = [s for q, s in scored if q.task == setting]
            of = [(q, s) for q, s in read if q.task == setting]
            if asked:
                groups.append(Cell("overall", setting, _right([s for _, s in of]), len(of)))
                groups.append(Cell("overall, of all asked", setting, mean(asked), len(asked)))
            for key in _GROUPED_BY:
                labels = dict.fromkeys(q.meta[key] for q, _ in of)
                for label in DURATIONS if key == "duration" else labels:
                    cell = [s for q, s in of if q.meta[key] == label]
                    if cell:
                        groups.append(Cell(f"{key}, {setting}", label, mean(cell), len(cell)))
        head = groups[0] if groups else Cell("overall", SETTINGS[0], float("nan"), 0)
        how = f"accuracy {head.label.replace('-', ' ')}, of the answered"
        return Summary.of(answered, how, (*groups, *self.unread(answered)), head.score)

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> list[Path]:
        """``video-mme-{setting}.json`` for each setting, in the format of the benchmark's result template."""
        paths = []
        for setting in SETTINGS:
            videos: dict[str, dict[str, Any]] = {}
            for a in answered:
                if a.sample.task != setting:
                    continue
                meta = a.sample.meta
                video = {**{k: meta[k] for k in _OF_VIDEO}, "questions": []}
                asked = {k: meta[k] for k in ("question_id", "task_type", "question")}
                answers = {"options": list(a.sample.choices), "answer": a.sample.answer}
                videos.setdefault(meta["video_id"], video)["questions"].append(
                    {**asked, **answers, "response": a.response}
                )
            if videos:
                paths.append(write_json(folder / f"video-mme-{setting}.json", list(videos.values())))
        return paths

    def _video(self, folder: Path, video_id: str) -> tuple[Video, ...] | str:
        """The video's clips, or its error."""
        path = find_video(folder, video_id, SUFFIXES)
        if path is None:
            return f"no video {folder / video_id} with any of {', '.join(SUFFIXES)}"
        try:
            return self.read(path)
        except UnreadableMedia as error:
            return str(error)

    def _samples(
        self, row: dict[str, Any], clips: tuple[Video, ...], setting: str, subtitles: Path, where: str
    ) -> Iterator[TaskSample | Problem]:
        """The question in one setting. A video without a subtitle file is asked without subtitles."""
        lines: list[str] = []
        if setting == "with-subtitles":
            path = subtitles / f"{row['videoID']}.srt"
            if path.is_file():
                try:
                    lines = on_screen(read_srt(path), [t for clip in clips for t in clip.source.seconds])
                except ValueError as error:
                    yield Problem(where, str(error))
                    return
            elif row["duration"] == "long":
                yield Problem(where, f"no {path}: every long video has one; asked without", skipped=False)
        options = tuple(row["options"])
        listed = "".join(f"{line}\n" for line in lines)
        before = f"This video's subtitles are listed below:\n{listed}" if lines else ""
        question = f"{before}{_ASK}\n" + "\n".join((row["question"], *options, "The best answer is:"))
        yield TaskSample(
            id=_id(setting, row),
            task=setting,
            parts=clips,
            question=question,
            answer=row["answer"],
            choices=options,
            meta={k: row[k] for k in _TEXTS if k != "answer"},
            where=where,
        )


def _id(setting: str, row: Mapping[str, Any]) -> str:
    return f"{setting}/{row['question_id']}"


def _right(scores: Sequence[float]) -> float:
    """The share of correct answers; 0 if nothing was answered, as in the benchmark's script."""
    return mean(scores) if scores else 0.0


def _row_error(row: dict[str, Any]) -> str:
    """The error in a row's fields, or ""."""
    for field in _TEXTS:
        if not isinstance(row[field], str) or not row[field]:
            return f"{field} is {row[field]!r}, no text"
    if row["duration"] not in DURATIONS:
        return f"duration {row['duration']!r} is none of {', '.join(DURATIONS)}"
    options = row["options"]
    if not options or len(options) != 4 or not all(isinstance(option, str) for option in options):
        return f"options are {options!r}, not four texts"
    return "" if row["answer"] in ("A", "B", "C", "D") else f"answer {row['answer']!r} is not a letter A to D"
