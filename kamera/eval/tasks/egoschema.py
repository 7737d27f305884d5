"""EgoSchema: five-way questions over three-minute first-person videos.

Layout: the repository's, ``questions.json``, ``subset_answers.json``, ``videos/{q_uid}.mp4``. The benchmark
publishes no prompt: prompt and extraction are lmms-eval's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError
from kamera.eval.tasks.clips import VideoTask
from kamera.eval.tasks.letters import LETTER_ONLY, LETTERS, first_letter
from kamera.eval.tasks.sample import Answered, Problem, Summary, TaskSample, Video, means_by
from kamera.eval.tasks.set_files import read_json, write_json

SUBTASKS = ("subset", "full")
"""The 500 questions with public answers, and all 5031, whose answers only the server has."""

OPTIONS = 5


class EgoSchema(VideoTask):
    """``subtasks``: ``subset`` (default) or ``full``, which holds the subset."""

    name = "egoschema"
    offered = SUBTASKS

    def letter(self, response: str, sample: TaskSample) -> str | None:
        return first_letter(response, sample.choices)

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        groups = means_by("task", ((a.sample.task, a.score) for a in answered if a.score is not None))
        return Summary.of(answered, "accuracy on the public subset", (*groups, *self.unread(answered)))

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> None:
        """``egoschema.json`` for the server, ``{q_uid: 0 to 4}``; responses without a letter are left out."""
        chosen = ((a.sample.meta["q_uid"], self.letter(a.response, a.sample)) for a in answered)
        submission = {uid: LETTERS.index(letter) for uid, letter in chosen if letter is not None}
        write_json(folder / "egoschema.json", submission)

    def files(self, data: Path) -> Iterator[Iterable[TaskSample | Problem]]:
        """The questions; ``answer`` is None if it is not public."""
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
        known = set(map(_uid, records))
        yield [Problem(str(answers), f"no question {uid!r}") for uid in labels if uid not in known]
        yield (
            _sample(data, f"{path}:record {number}", record, labels)
            for number, record in enumerate(records)
            if "full" in self.subtasks or _uid(record) is None or _uid(record) in labels
        )


def _sample(data: Path, where: str, record: Any, labels: Mapping[str, Any]) -> TaskSample | Problem:
    """The sample, its video unread."""
    uid = _uid(record)
    if uid is None:
        return Problem(where, f"no q_uid in {str(record)[:60]!r}")
    question, options = record.get("question"), [record.get(f"option {i}") for i in range(OPTIONS)]
    if not isinstance(question, str) or not question:
        return Problem(where, f"question of {uid} is {question!r}, no text")
    if not all(isinstance(option, str) for option in options):
        return Problem(where, f"options of {uid} are {options!r}, not {OPTIONS} texts")
    answer = labels.get(uid)
    if answer is not None and (isinstance(answer, bool) or answer not in range(OPTIONS)):
        return Problem(where, f"answer {answer!r} of {uid} is not a number 0 to {OPTIONS - 1}")
    lettered = tuple(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    return TaskSample(
        id=f"egoschema/{uid}",
        task="full" if answer is None else "subset",
        parts=(Video(str(data / "videos" / uid)),),
        question="\n".join((question, *lettered)) + LETTER_ONLY,
        answer=None if answer is None else LETTERS[answer],
        choices=lettered,
        meta={"q_uid": uid},
        where=where,
    )


def _uid(record: Any) -> str | None:
    uid = record.get("q_uid") if isinstance(record, dict) else None
    return uid if isinstance(uid, str) else None
