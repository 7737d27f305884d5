"""Video-MME: multiple-choice questions over videos of seconds to an hour, without and with subtitles.

Layout: ``videomme/test-00000-of-00001.parquet``, ``data/{videoID}.mp4`` (.MP4, .mkv) and
``subtitle/{videoID}.srt`` of the Hugging Face set, its archives unpacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError
from kamera.eval.tasks.clips import VideoTask
from kamera.eval.tasks.letters import first_abcd
from kamera.eval.tasks.sample import Answered, Cell, Problem, Summary, TaskSample, Video, mean, means_by
from kamera.eval.tasks.set_files import read_parquet, write_json
from kamera.eval.tasks.subtitles import on_screen, read_srt

SETTINGS = ("without-subtitles", "with-subtitles")
DURATIONS = ("short", "medium", "long")

_OF_VIDEO = ("video_id", "duration", "domain", "sub_category")
_TEXTS = (*_OF_VIDEO, "videoID", "question_id", "task_type", "question", "answer")
_ASK = (
    "Select the best answer to the following multiple-choice question based on the video. "
    "Respond with only the letter (A, B, C, or D) of the correct option."
)


class VideoMME(VideoTask):
    """``subtasks`` are settings (default: without subtitles)."""

    name = "video-mme"
    offered = SETTINGS

    def files(self, data: Path) -> Iterator[Iterable[TaskSample | Problem]]:
        """The table, of which a row is a question, asked once per setting."""
        table = data / "videomme" / "test-00000-of-00001.parquet"
        if not table.is_file():
            raise TaskDataError(f"{table}: no such file: give the Video-MME folder as published")
        if "with-subtitles" in self.subtasks and not (data / "subtitle").is_dir():
            raise TaskDataError(f"{data / 'subtitle'}: no such folder: unpack subtitle.zip")
        yield self._samples(data, table)

    def _samples(self, data: Path, table: Path) -> Iterator[TaskSample | Problem]:
        for number, row in read_parquet(table, (*_TEXTS, "options")):
            where = f"{table}:row {number}"
            if bad := _row_error(row):
                yield Problem(where, bad)
                continue
            for setting in self.subtasks:
                yield TaskSample(
                    id=f"{setting}/{row['question_id']}",
                    task=setting,
                    parts=(Video(str(data / "data" / row["videoID"])),),
                    question=f"{_ASK}\n"
                    + "\n".join((row["question"], *row["options"], "The best answer is:")),
                    answer=row["answer"],
                    choices=tuple(row["options"]),
                    meta={k: row[k] for k in _TEXTS if k != "answer"},
                    where=where,
                )

    def with_media(self, sample: TaskSample) -> Iterator[TaskSample | Problem]:
        """With subtitles, if asked for; a video without a subtitle file is asked without."""
        (folder,) = (Path(part.source).parents[1] for part in sample.parts if isinstance(part, Video))
        for item in super().with_media(sample):
            if isinstance(item, Problem) or item.task != "with-subtitles":
                yield item
                continue
            path = folder / "subtitle" / f"{item.meta['videoID']}.srt"
            if path.is_file():
                try:
                    clips = [part.source for part in item.parts if isinstance(part, Video)]
                    lines = on_screen(read_srt(path), [time for clip in clips for time in clip.seconds])
                except ValueError as error:
                    yield Problem(item.where, str(error))
                    continue
                before = "".join(f"{line}\n" for line in ("This video's subtitles are listed below:", *lines))
                item = replace(item, question=before * bool(lines) + item.question)
            elif item.meta["duration"] == "long":
                yield Problem(
                    item.where, f"no {path}: every long video has one; asked without", skipped=False
                )
            yield item

    def letter(self, response: str, sample: TaskSample) -> str | None:
        return first_abcd(response)

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        """Official: correct per answered, as in the benchmark's own script; ``mean`` is over all samples.

        Overall and by duration, domain, sub-category and task type, for each setting; a response without a
        letter counts as unanswered. A setting without an answer has 0, as in that script.
        """
        labelled = [a for a in answered if a.score is not None]
        scored = [(a.sample, float(a.score or 0.0)) for a in labelled]
        read = [pair for a, pair in zip(labelled, scored, strict=True) if first_abcd(a.response) is not None]
        groups: list[Cell] = []
        for setting in SETTINGS:
            asked = [s for q, s in scored if q.task == setting]
            of = [(q, s) for q, s in read if q.task == setting]
            if asked:
                groups.append(Cell("overall", setting, mean([s for _, s in of] or [0.0]), len(of)))
                groups.append(Cell("overall, of all asked", setting, mean(asked), len(asked)))
            lengths = ((length, s) for length in DURATIONS for q, s in of if q.meta["duration"] == length)
            groups += means_by(f"duration, {setting}", lengths)
            for key in ("domain", "sub_category", "task_type"):
                groups += means_by(f"{key}, {setting}", ((q.meta[key], s) for q, s in of))
        head = groups[0] if groups else Cell("overall", SETTINGS[0], float("nan"), 0)
        how = f"accuracy {head.label.replace('-', ' ')}, of the answered"
        return Summary.of(answered, how, (*groups, *self.unread(answered)), head.score)

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> None:
        """``video-mme-{setting}.json`` for each setting, in the format of the benchmark's result template."""
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
                write_json(folder / f"video-mme-{setting}.json", list(videos.values()))


def _row_error(row: dict[str, Any]) -> str:
    for field in _TEXTS:
        if not isinstance(row[field], str) or not row[field]:
            return f"{field} is {row[field]!r}, no text"
    if row["duration"] not in DURATIONS:
        return f"duration {row['duration']!r} is none of {', '.join(DURATIONS)}"
    options = row["options"]
    if not options or len(options) != 4 or not all(isinstance(option, str) for option in options):
        return f"options are {options!r}, not four texts"
    return "" if row["answer"] in ("A", "B", "C", "D") else f"answer {row['answer']!r} is not a letter A to D"
