"""The frozen benchmark as a task: every item behind every trace is a sample."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kamera.eval.reuse.doc_score import score_document
from kamera.eval.reuse.frozen import check_picture, load
from kamera.eval.reuse.item import Item
from kamera.eval.reuse.traces import TRACES
from kamera.eval.tasks.letters import LETTERS, decision_of, last_letter
from kamera.eval.tasks.mm_niah_score import decide, score_response
from kamera.eval.tasks.sample import Answered, Problem, Summary, Task, TaskSample, means_by
from kamera.eval.tasks.set_files import write_lines


class ReuseBench(Task):
    """``subtasks`` are the traces to ask behind (default: all).

    Scores and decisions follow the rule that an item names in ``meta``. Both raise ValueError for another.

    | rule | an answer is right by |
    |---|---|
    | ``letter`` | the option's letter (MuirBench's own rule; OVO-Bench's answers are letters, too) |
    | ``words`` | its words, whatever their case and punctuation |
    | ``first-word`` | its first word: an action's name, yes or no |
    | ``mm-niah`` | MM-NIAH's own scorer |
    | ``document`` | MMLongBench-Doc's, on the whole response, without the language model that shortens it |
    """

    name = "reuse"
    offered = TRACES

    def files(self, data: Path) -> Iterator[Iterable[TaskSample | Problem]]:
        """One file, of which each item is a record; errors as in `frozen.load`."""
        yield (
            _sample(item, trace, f"{data}: {item.sample.id}")
            for item in load(data).items
            for trace in item.traces
            if trace in (self.subtasks or TRACES)
        )

    def with_media(self, sample: TaskSample) -> Iterator[TaskSample | Problem]:
        """The sample, if its pictures are those that were frozen."""
        for part in (*sample.parts, *sample.others):
            check_picture(part)
        yield sample

    def max_new_tokens(self, sample: TaskSample) -> int:
        return int(sample.meta["max_new_tokens"])

    def score(self, response: str, sample: TaskSample) -> float:
        response, rule = response.strip(), sample.meta["rule"]
        if rule == "letter":
            return float(_letter(response, sample) == sample.answer)
        if rule == "mm-niah":
            return score_response(response, sample.answer)
        if rule == "document":
            return score_document(response, sample.answer, sample.meta["answer_format"])
        return float(self.decision(response, sample) == _words(str(sample.answer)))

    def decision(self, response: str, sample: TaskSample) -> str:
        response, rule = response.strip(), sample.meta["rule"]
        if rule == "letter":
            return decision_of(_letter(response, sample), response)
        if rule == "mm-niah":
            return decide(response, type(sample.answer))
        if rule == "first-word":
            return _words(response).split(" ")[0]
        if rule in ("words", "document"):
            return _words(response)
        raise ValueError(f"an item is scored by {rule!r}: no rule of this Kamera")

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        scored = [(a.sample.task, a.score) for a in answered if a.score is not None]
        return Summary.of(answered, "mean over items and traces", means_by("trace", scored))

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> None:
        """``reuse.jsonl``: item, trace, label and response."""
        lines = [
            {"item": a.sample.meta["item"], "trace": a.sample.task}
            | {"answer": a.sample.answer, "response": a.response}
            for a in answered
        ]
        write_lines(folder / "reuse.jsonl", lines)


def _sample(item: Item, trace: str, where: str) -> TaskSample:
    """The item behind a trace, with those of its other units that earlier windows show."""
    sample, (*before, _) = item.sample, item.traces[trace]
    size = len(sample.parts)
    shown = [*range(size), *dict.fromkeys(i for window in before for i in window if i >= size)]
    return replace(
        sample,
        id=f"{sample.id}/{trace}",
        task=trace,
        meta={**sample.meta, "item": sample.id},
        where=where,
        others=tuple(sample.others[i - size] for i in shown[size:]),
        before=tuple(tuple(map(shown.index, window)) for window in before),
    )


def _letter(response: str, sample: TaskSample) -> str | None:
    found = last_letter(response, sample.choices)
    alone = response.strip().strip(".()").upper()
    return found or (alone if alone in LETTERS[: len(sample.choices)] else None)


def _words(response: str) -> str:
    return " ".join(re.findall(r"\w+", response.lower()))
