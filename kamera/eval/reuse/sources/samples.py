"""Items of the benchmarks that `kamera.eval.tasks` reads: MM-NIAH and MuirBench."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kamera.eval.reuse.item import Item
from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.muirbench import MuirBench
from kamera.eval.tasks.sample import Problem, Task, TaskSample, Video


def mm_niah(data: Path, units: int) -> Iterator[Item | Problem]:
    """MM-NIAH's val split: the document's pictures and texts, as published; ``units`` does not cut them."""
    yield from _items(MMNiah(), data, "mm-niah")


def muirbench(data: Path, units: int) -> Iterator[Item | Problem]:
    """MuirBench: the pictures of the question, not those of its choices; ``units`` does not cut them."""
    yield from _items(MuirBench(), data, "letter")


def _items(task: Task, data: Path, rule: str) -> Iterator[Item | Problem]:
    for sample in task.load(data):
        yield sample if isinstance(sample, Problem) else _item(task, sample, rule)


def _item(task: Task, sample: TaskSample, rule: str) -> Item:
    parts = [part for part in sample.parts if not isinstance(part, Video)]  # these sets have no clips
    reused = [part for part in parts if not part.live]
    return Item(
        id=sample.id,
        source=task.name,
        task=sample.task,
        units={f"u{i}": part for i, part in enumerate(reused)},
        window=tuple(f"u{i}" for i in range(len(reused))),
        question=sample.question,
        answer=sample.answer,
        meta={"rule": rule},
        live=tuple(part for part in parts if part.live),
        choices=sample.choices,
        max_new_tokens=task.max_new_tokens(sample),
    )
