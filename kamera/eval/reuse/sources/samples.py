"""Samples of the benchmarks that `kamera.eval.tasks` reads: MM-NIAH and MuirBench."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from kamera.eval.tasks.mm_niah import MMNiah
from kamera.eval.tasks.muirbench import MuirBench
from kamera.eval.tasks.sample import Problem, Task, TaskSample


def mm_niah(data: Path, units: int) -> Iterator[TaskSample | Problem]:
    """MM-NIAH's val split: the document's pictures and texts, as published; ``units`` does not cut them."""
    yield from _samples(MMNiah(), data, "mm-niah")


def muirbench(data: Path, units: int) -> Iterator[TaskSample | Problem]:
    """MuirBench: the pictures of the question, not those of its choices; ``units`` does not cut them."""
    yield from _samples(MuirBench(), data, "letter")


def _samples(task: Task, data: Path, rule: str) -> Iterator[TaskSample | Problem]:
    for sample in task.load(data):
        if not isinstance(sample, Problem):
            parts = tuple(sorted(sample.parts, key=attrgetter("live")))  # stable
            meta = {"rule": rule, "max_new_tokens": task.max_new_tokens(sample)}
            sample = replace(sample, parts=parts, meta=meta)
        yield sample
