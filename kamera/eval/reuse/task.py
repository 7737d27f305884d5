"""The frozen benchmark as a task: every item behind every trace is a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kamera.eval.reuse.frozen import Benchmark, load
from kamera.eval.reuse.item import Item
from kamera.eval.reuse.scoring import decision, score
from kamera.eval.reuse.traces import TRACES
from kamera.eval.tasks.sample import (
    Answered,
    Problem,
    Summary,
    TaskSample,
    Wanted,
    every,
    grouped,
)
from kamera.eval.tasks.set_files import write_lines


class ReuseBench:
    """``subtasks`` names the traces to ask behind (default: all). Raises ValueError for an unknown one."""

    name = "reuse"
    overlong: Literal["left", "refuse"] = "refuse"

    def __init__(self, subtasks: Sequence[str] = ()) -> None:
        if unknown := sorted(set(subtasks) - set(TRACES)):
            raise ValueError(f"trace {unknown[0]!r} is none of {', '.join(TRACES)}")
        self.subtasks = tuple(subtasks or TRACES)

    @property
    def settings(self) -> Mapping[str, Any]:
        """No settings."""
        return {}

    def load(
        self, data: Path, limit: int | None = None, wanted: Wanted = every
    ) -> Iterator[TaskSample | Problem]:
        """The samples of the first ``limit`` items; see `Task.load`; errors as in `frozen.load`."""
        benchmark = load(data)
        for item in benchmark.items[:limit]:
            for trace in item.traces:
                if trace in self.subtasks and wanted(f"{item.sample.id}/{trace}"):
                    yield _sample(benchmark, item, trace)

    def max_new_tokens(self, sample: TaskSample) -> int:
        """The item's."""
        return int(sample.meta["max_new_tokens"])

    def score(self, response: str, sample: TaskSample) -> float:
        """By the rule that the item names."""
        return score(response, sample)

    def decision(self, response: str, sample: TaskSample) -> str:
        """By the same rule."""
        return decision(response, sample)

    def summarize(self, answered: Sequence[Answered]) -> Summary:
        """The mean over items and traces, and by trace."""
        scored = [(a.sample.task, a.score) for a in answered if a.score is not None]
        return Summary.of(answered, "mean over items and traces", grouped("trace", scored))

    def write_predictions(self, answered: Sequence[Answered], folder: Path) -> list[Path]:
        """``reuse.jsonl``: item, trace, label and response."""
        lines = [
            {"item": a.sample.meta["item"], "trace": a.sample.task}
            | {"answer": a.sample.answer, "response": a.response}
            for a in answered
        ]
        return [write_lines(folder / "reuse.jsonl", lines)]


def _sample(benchmark: Benchmark, item: Item, trace: str) -> TaskSample:
    """The item behind a trace, with those of its other units that earlier windows show."""
    sample, (*before, _) = item.sample, item.traces[trace]
    size = len(sample.parts)
    shown = [*range(size), *dict.fromkeys(i for window in before for i in window if i >= size)]
    return replace(
        sample,
        id=f"{sample.id}/{trace}",
        task=trace,
        parts=tuple(map(benchmark.media, sample.parts)),
        meta={**sample.meta, "item": sample.id},
        where=f"{benchmark.folder}: {sample.id}",
        others=tuple(benchmark.media(sample.others[i - size]) for i in shown[size:]),
        before=tuple(tuple(map(shown.index, window)) for window in before),
    )
