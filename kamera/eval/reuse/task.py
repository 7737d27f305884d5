"""The frozen benchmark as a task: every item behind every trace is a sample."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kamera.eval.reuse.frozen import check_picture, load
from kamera.eval.reuse.item import Item
from kamera.eval.reuse.scoring import decision, score
from kamera.eval.reuse.traces import TRACES
from kamera.eval.tasks.sample import Answered, Problem, Summary, Task, TaskSample, means_by
from kamera.eval.tasks.set_files import write_lines


class ReuseBench(Task):
    """``subtasks`` are the traces to ask behind (default: all)."""

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
        return score(response, sample)

    def decision(self, response: str, sample: TaskSample) -> str:
        return decision(response, sample)

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
