"""EgoSchema: five-way questions over three-minute first-person videos.

Layout: the repository's, ``questions.json``, ``subset_answers.json``, ``videos/{q_uid}.mp4``. The benchmark
publishes no prompt: prompt and extraction are lmms-eval's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError, UnreadableMedia
from kamera.eval.tasks.clips import VideoTask, find_video
from kamera.eval.tasks.letters import LETTERS, first_letter
from kamera.eval.tasks.sample import Answered, Cell, Problem, Summary, TaskSample, Wanted, every, mean
from kamera.eval.tasks.set_files import read_json

SUBTASKS = ("subset", "full")
"""The 500 questions with public answers, and all 5031, whose answers only the server has."""

OPTIONS = 5

_Found = tuple[str, str, Any, Any, Any]
"""Location, uid, and the unchecked question, options and answer of one item."""

_SUFFIXES = (".mp4", ".MP4")
_POST = "\nAnswer with the option's letter from the given choices directly."


class EgoSchema(VideoTask):
    """``subtasks``: ``subset`` (default) or ``full``, which holds the subset; the rest: `ClipSampling`."""

    name = "egoschema"
    title = "EgoSchema"
    offered = SUBTASKS

    def load(
        self, data: Path, limit: int | None = None, wanted: Wanted = every
    ) -> Iterator[TaskSample | Problem]:
        """Samples in file order; ``answer`` is None if it is not public. See `Task.load`."""
        seen: set[str] = set()
        for found in self._records(data):
            if limit is not None and len(seen) >= limit:
                return
            if isinstance(found, Problem):
                yield found
                continue
            where, uid = found[:2]
            if uid in seen:
                yield Problem(where, f"q_uid {uid!r} occurs twice")
                continue
            made = _fault(*found) or find_video(data / "videos", uid, _SUFFIXES)
            if not isinstance(made, Path):
                yield made or Problem(where, f"no video {data / 'videos' / uid}.mp4")
                continue
            seen.add(uid)
            if wanted(f"egoschema/{uid}"):
                yield self._sample(made, *found)

    def letter(self, response: str, sample: TaskSample) -> str | None:
        """The first of several."""
        return first_letter(response, sample.choices)

    def score(self, response: str, sample: TaskSample) -> float:
        """1.0 if the extracted option is the answer; a response without a letter is wrong."""
        return float(_index(response, sample) == sample.answer)

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        """Accuracy over the samples with public answers."""
        scores = [a.score for a in answered if a.score is not None]
        overall = mean(scores)
        groups = (Cell("task", "subset", overall, len(scores)),) if scores else ()
        lost = self.unread(answered)
        return Summary(overall, "accuracy on the public subset", overall, len(scores), groups + lost)

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> list[Path]:
        """``egoschema.json`` for the server, ``{q_uid: 0 to 4}``; responses without a letter are left out."""
        path = folder / "egoschema.json"
        chosen = {a.sample.meta["q_uid"]: _index(a.response, a.sample) for a in answered}
        submission = {uid: index for uid, index in chosen.items() if index is not None}
        path.write_text(json.dumps(submission, indent=4) + "\n", encoding="utf-8")
        return [path]

    def _records(self, data: Path) -> Iterator[Problem | _Found]:
        path, answers = data / "questions.json", data / "subset_answers.json"
        if not path.is_file():
            raise TaskDataError(f"{path}: no such file: give the EgoSchema folder as published")
        records = read_json(path, list)
        if records and not any(isinstance(r, dict) and "question" in r for r in records):
            raise TaskDataError(
                f"{path}: no record has a question: a published snapshot of this file lacks them all; "
                "download another version"
            )
        if not answers.is_file() and "full" not in self.subtasks:
            raise TaskDataError(f"{answers}: no such file, so nothing to score: give it, or the task 'full'")
        labels = read_json(answers, dict) if answers.is_file() else {}
        if not labels:
            yield Problem(str(answers), "no such file, or no answer in it: nothing is scored", skipped=False)
        known = {str(r.get("q_uid")) for r in records if isinstance(r, dict)}
        yield from (Problem(str(answers), f"no question {uid!r}") for uid in labels if uid not in known)
        for number, record in enumerate(records):
            where = f"{path}:record {number}"
            uid = record.get("q_uid") if isinstance(record, dict) else None
            if not isinstance(uid, str):
                yield Problem(where, f"no q_uid in {str(record)[:60]!r}")
                continue
            if "full" in self.subtasks or uid in labels:
                options = [record.get(f"option {i}") for i in range(OPTIONS)]
                lettered = [f"{LETTERS[i]}. {o}" if isinstance(o, str) else o for i, o in enumerate(options)]
                yield where, uid, record.get("question"), lettered, labels.get(uid)

    def _sample(
        self, path: Path, where: str, uid: str, question: str, options: Sequence[str], answer: Any
    ) -> TaskSample | Problem:
        try:
            clips = self.sampling.read(path)
        except UnreadableMedia as error:
            return Problem(where, str(error))
        return TaskSample(
            id=f"egoschema/{uid}",
            task="full" if answer is None else "subset",
            parts=self.sampling.parts(clips),
            question="\n".join((question, *options)) + _POST,
            answer=answer,
            choices=tuple(options),
            meta={"q_uid": uid},
            where=where,
        )


def _fault(where: str, uid: str, question: Any, options: Any, answer: Any) -> Problem | None:
    if not isinstance(question, str) or not question:
        return Problem(where, f"question of {uid} is {question!r}, no text")
    if not options or len(options) != OPTIONS or not all(isinstance(option, str) for option in options):
        return Problem(where, f"options of {uid} are {options!r}, not {OPTIONS} texts")
    if answer is not None and not _is_label(answer):
        return Problem(where, f"answer {answer!r} of {uid} is not a number 0 to {OPTIONS - 1}")
    return None


def _index(response: str, sample: TaskSample) -> int | None:
    letter = first_letter(response, sample.choices)
    return None if letter is None else LETTERS.index(letter)


def _is_label(answer: Any) -> bool:
    return not isinstance(answer, bool) and answer in range(OPTIONS)
