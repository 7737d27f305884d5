"""The frozen benchmark as a task: every item behind every trace is a sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kamera.eval.reuse.frozen import Benchmark, load
from kamera.eval.reuse.item import Item, WindowTrace
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
                if trace.name in self.subtasks and wanted(f"{item.id}/{trace.name}"):
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


def _sample(benchmark: Benchmark, item: Item, trace: WindowTrace) -> TaskSample:
    """The published window as parts; units of earlier windows that are not in it beside them."""
    *before, last = trace.windows
    others = dict.fromkeys(name for window in before for name in window if name not in last)
    names = [*last, *(f"live {i}" for i in range(len(item.live))), *others]
    return TaskSample(
        id=f"{item.id}/{trace.name}",
        task=trace.name,
        parts=(
            *(benchmark.media(item.units[name]) for name in last),
            *map(benchmark.media, item.live),
        ),
        question=item.question,
        answer=item.answer,
        choices=item.choices,
        meta={**item.meta, "item": item.id, "max_new_tokens": item.max_new_tokens},
        where=f"{benchmark.folder}: {item.id}",
        others=tuple(benchmark.media(item.units[name]) for name in others),
        before=tuple(tuple(names.index(name) for name in window) for window in before),
    )
