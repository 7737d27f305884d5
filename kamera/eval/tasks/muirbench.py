"""MuirBench: multiple-choice questions over several pictures, in 12 tasks.

Layout: the parquet files of the Hugging Face set, ``data/test-*.parquet``. Prompts: the benchmark's
own, or lmms-eval's (``form="lmms-eval"``), each with its own answer extraction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kamera.errors import TaskDataError
from kamera.eval.tasks.letters import LETTER_ONLY, LETTERS, LetterTask, last_letter, leading_letter
from kamera.eval.tasks.sample import (
    Answered,
    Picture,
    Problem,
    Summary,
    TaskSample,
    interleave,
    means_by,
)
from kamera.eval.tasks.set_files import decode_picture, read_parquet, write_lines

TASKS = (
    "Geographic Understanding",
    "Diagram Understanding",
    "Scene Understanding",
    "Action Understanding",
    "Cartoon Understanding",
    "Image-Text Matching",
    "Difference Spotting",
    "Visual Retrieval",
    "Counting",
    "Attribute Similarity",
    "Visual Grounding",
    "Ordering",
)
NONE_FITS = "None of the choices provided"
"""The correct option of an unanswerable item; each has an answerable counterpart."""

_KINDS = (("answerable", True), ("unanswerable", False))
_COLUMNS = (
    *("idx", "task", "image_relation", "image_type", "question", "options", "answer", "image_list"),
    "counterpart_idx",
)


class MuirBench(LetterTask):
    """``subtasks`` names the tasks to ask (default all 12), ``form`` the prompt and its extraction."""

    name = "muirbench"
    offered = TASKS

    def __init__(
        self,
        subtasks: Sequence[str] | None = None,
        form: Literal["official", "lmms-eval"] = "official",
    ) -> None:
        super().__init__(subtasks or TASKS)
        if form not in ("official", "lmms-eval"):
            raise ValueError(f"form {form!r} is none of official, lmms-eval")
        self.form = form

    @property
    def settings(self) -> Mapping[str, Any]:
        return {"form": self.form}

    def files(self, data: Path) -> Iterator[Iterable[TaskSample | Problem]]:
        shards = sorted((data / "data").glob("test-*.parquet"))
        if not shards:
            raise TaskDataError(f"{data}: no data/test-*.parquet: give the MuirBench folder as published")
        made = (
            self._sample(row, f"{shard}:row {n}")
            for shard in shards
            for n, row in read_parquet(shard, _COLUMNS)
        )
        yield (item for item in made if isinstance(item, Problem) or item.task in self.subtasks)

    def letter(self, response: str, sample: TaskSample) -> str | None:
        return last_letter(response, sample.choices) if self.form == "official" else leading_letter(response)

    def score(self, response: str, sample: TaskSample) -> float:
        found = self.letter(response, sample)
        return float(found is not None and found.strip().lower() == sample.answer.lower())

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        """Accuracy over all samples, per task, and of unanswerable items and their counterparts."""
        scored = [(a.sample, a.score) for a in answered if a.score is not None]
        tasks = means_by("task", ((task, s) for task in TASKS for q, s in scored if q.task == task))
        kinds = [(kind, s) for kind, can in _KINDS for q, s in scored if q.meta["answerable"] is can]
        groups = (*tasks, *means_by("kind", [*kinds, *(("both of a pair", s) for s in _pairs(scored))]))
        return Summary.of(answered, "accuracy over all samples", (*groups, *self.unread(answered)))

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> None:
        """``muirbench.jsonl``: lmms-eval's per-item fields, and the response."""
        lines = [
            {k: a.sample.meta[k] for k in ("idx", "task", "image_relation", "image_type")}
            | {"answer": a.sample.answer, "pred": self.letter(a.response, a.sample), "response": a.response}
            for a in answered
        ]
        write_lines(folder / "muirbench.jsonl", lines)

    def _sample(self, row: dict[str, Any], where: str) -> TaskSample | Problem:
        for field in ("idx", "counterpart_idx"):  # numbers or text: the set's card does not fix it
            row[field] = None if row[field] is None else str(row[field])
        bad = _row_error(row)
        if bad:
            return Problem(where, bad)
        try:
            pictures = [decode_picture(cell) for cell in row["image_list"]]
        except ValueError as error:
            return Problem(where, f"image_list holds {error}")
        options = tuple(row["options"])
        pieces = self._prompt(row["question"], options).split("<image>")
        if len(pieces) - 1 != len(pictures):
            return Problem(
                where, f"{len(pieces) - 1} <image> in question and options, {len(pictures)} images"
            )
        shown = row["question"].count("<image>")  # the others are choices
        placed = [Picture(image, live=n >= shown) for n, image in enumerate(pictures)]
        parts = interleave(pieces, placed, live=True)[:-1]
        meta = {k: row[k] for k in ("idx", "task", "image_relation", "image_type", "counterpart_idx")}
        meta["answerable"] = options[LETTERS.index(row["answer"])].strip() != NONE_FITS
        return TaskSample(
            id=f"muirbench/{row['idx']}",
            task=row["task"],
            parts=tuple(parts),
            question=pieces[-1],
            answer=row["answer"],
            choices=options,
            meta=meta,
            where=where,
        )

    def _prompt(self, question: str, options: Sequence[str]) -> str:
        lettered = list(zip(LETTERS, options, strict=False))
        if self.form == "lmms-eval":
            choices = "\n".join(f"{letter}. {option}" for letter, option in lettered)
            return f"{question}\n{choices}{LETTER_ONLY}"
        choices = "\n".join(f"({letter}) {option}" for letter, option in lettered)
        hint = "Please provide the correct option letter, such as A, B, C, D, directly."
        return f"Question: {question}\nChoices:\n{choices}\nHint: {hint}\nAnswer:"


def _row_error(row: dict[str, Any]) -> str:
    for field in ("idx", "task", "question", "answer"):
        if not isinstance(row[field], str) or not row[field]:
            return f"{field} is {row[field]!r}, no text"
    if row["task"] not in TASKS:
        return f"unknown task {row['task']!r}"
    options, images = row["options"], row["image_list"]
    if not options or not all(isinstance(option, str) for option in options):
        return f"options are {options!r}"
    if row["answer"] not in LETTERS[: len(options)]:
        return f"answer {row['answer']!r} is none of the {len(options)} options"
    return "" if images else "image_list is empty"


def _pairs(scored: Sequence[tuple[TaskSample, float]]) -> list[float]:
    """1.0 if both items of a pair are right, else 0.0; once for every pair with both items asked."""
    by_idx = {q.meta["idx"]: (q.meta["counterpart_idx"], s) for q, s in scored}
    return [
        min(score, by_idx[other][1])
        for idx, (other, score) in by_idx.items()
        if other in by_idx and (by_idx[other][0] != idx or str(idx) < str(other))
    ]
