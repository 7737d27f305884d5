"""EgoSchema: five-way questions over three-minute first-person videos.

Layout: the repository's, ``questions.json``, ``subset_answers.json``, ``videos/{q_uid}.mp4``. The benchmark
publishes no prompt: prompt and extraction are lmms-eval's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError, UnreadableMedia
from kamera.eval.tasks.clips import VideoTask, find_video
from kamera.eval.tasks.letters import LETTERS, first_letter
from kamera.eval.tasks.sample import Answered, Cell, Problem, Summary, TaskSample, Wanted, every, mean
from kamera.eval.tasks.set_files import read_json, write_json

SUBTASKS = ("subset", "full")
"""The 500 questions with public answers, and all 5031, whose answers only the server has."""

OPTIONS = 5

_SUFFIXES = (".mp4", ".MP4")
_POST = "\nAnswer with the option's letter from the given choices directly."


class EgoSchema(VideoTask):
    """``subtasks``: ``subset`` (default) or ``full``, which holds the subset; the rest: `VideoTask`."""

    name = "egoschema"
    title = "EgoSchema"
    offered = SUBTASKS

    def load(
        self, data: Path, limit: int | None = None, wanted: Wanted = every
    ) -> Iterator[TaskSample | Problem]:
        """Samples in file order; ``answer`` is None if it is not public. See `Task.load`."""
        seen: set[str] = set()
        for made in self._records(data):
            if limit is not None and len(seen) >= limit:
                return
            if isinstance(made, Problem):
                yield made
                continue
            uid = made.meta["q_uid"]
            path = find_video(data / "videos", uid, _SUFFIXES)
            if made.id in seen:
                yield Problem(made.where, f"q_uid {uid!r} occurs twice")
                continue
            if path is None:
                yield Problem(made.where, f"no video {data / 'videos' / uid}.mp4")
                continue
            seen.add(made.id)
            if wanted(made.id):
                try:
                    yield replace(made, parts=self.read(path))
                except UnreadableMedia as error:
                    yield Problem(made.where, str(error))

    def letter(self, response: str, sample: TaskSample) -> str | None:
        """The first of several."""
        return first_letter(response, sample.choices)

    def score(self, response: str, sample: TaskSample) -> float:
        """1.0 if the extracted option is the answer; a response without a letter is wrong."""
        return float(_index(response, sample) == sample.answer)

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        """Accuracy over the samples with public answers."""
        scores = [a.score for a in answered if a.score is not None]
        groups = (Cell("task", "subset", mean(scores), len(scores)),) if scores else ()
        return Summary.of(answered, "accuracy on the public subset", groups + self.unread(answered))

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> list[Path]:
        """``egoschema.json`` for the server, ``{q_uid: 0 to 4}``; responses without a letter are left out."""
        chosen = {a.sample.meta["q_uid"]: _index(a.response, a.sample) for a in answered}
        submission = {uid: index for uid, index in chosen.items() if index is not None}
        return [write_json(folder / "egoschema.json", submission)]

    def _records(self, data: Path) -> Iterator[TaskSample | Problem]:
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
                yield _sample(where, uid, record, labels.get(uid))


def _sample(where: str, uid: str, record: Mapping[str, Any], answer: Any) -> TaskSample | Problem:
    """The sample without its parts."""
    question, options = record.get("question"), [record.get(f"option {i}") for i in range(OPTIONS)]
    if not isinstance(question, str) or not question:
        return Problem(where, f"question of {uid} is {question!r}, no text")
    if not all(isinstance(option, str) for option in options):
        return Problem(where, f"options of {uid} are {options!r}, not {OPTIONS} texts")
    if answer is not None and (isinstance(answer, bool) or answer not in range(OPTIONS)):
        return Problem(where, f"answer {answer!r} of {uid} is not a number 0 to {OPTIONS - 1}")
    lettered = tuple(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    return TaskSample(
        id=f"egoschema/{uid}",
        task="full" if answer is None else "subset",
        parts=(),
        question="\n".join((question, *lettered)) + _POST,
        answer=answer,
        choices=lettered,
        meta={"q_uid": uid},
        where=where,
    )


def _index(response: str, sample: TaskSample) -> int | None:
    letter = first_letter(response, sample.choices)
    return None if letter is None else LETTERS.index(letter)
