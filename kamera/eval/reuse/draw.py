"""Items for a benchmark: drawn from a source by a seed, given donors and traces."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from kamera.errors import TaskDataError
from kamera.eval.reuse.item import LEAST, Item, context_parts
from kamera.eval.reuse.sources import NAMES, SOURCES, TESTBED, world
from kamera.eval.reuse.traces import draw_traces
from kamera.eval.tasks.sample import Part, Passage, Picture, Problem, TaskSample, report_duplicates

UNITS = 8
"""Frames, pages or screenshots of a window, where the set leaves the choice."""

_NOTHING = "This line says nothing about what comes below it.\n" * 8


def draw_items(
    source: str,
    data: Path | None,
    *,
    count: int,
    seed: int = 0,
    units: int = UNITS,
) -> Iterator[Item | Problem]:
    """``count`` items with their traces, drawn by ``seed`` from those with four visual units or more.

    A smaller draw is a part of a larger one. Problems of the data come first. Raises ValueError for an
    unknown source or missing ``data``, TaskDataError if there are too few items for donors.
    """
    if source not in NAMES:
        raise ValueError(f"source {source!r} is none of {', '.join(NAMES)}")
    if source == TESTBED:
        for sample in world.read(count, seed):
            yield Item(sample, draw_traces(sample, seed))
        return
    if data is None:
        raise ValueError(f"source {source!r} needs --data, the set's folder as published")
    problems: list[Problem] = []
    found = _fitting(SOURCES[source](data, units), problems)
    lots = heapq.nsmallest(count, ((_lot(f"{seed}:{sample.id}"), sample.id, sample) for sample in found))
    drawn = [sample for _, _, sample in sorted(lots, key=itemgetter(1))]
    yield from problems
    if len(drawn) < 2:
        raise TaskDataError(f"{data}: {len(drawn)} items with {LEAST} visual units: donors need two at least")
    for sample in drawn:
        whole = replace(sample, others=(*_donors(sample, drawn, seed), Passage(_NOTHING)))
        yield Item(whole, draw_traces(whole, seed))


def _fitting(samples: Iterator[TaskSample | Problem], problems: list[Problem]) -> Iterator[TaskSample]:
    """The samples with enough visual units; the ``problems`` are noted."""
    for sample in report_duplicates(samples):
        if isinstance(sample, Problem):
            problems.append(sample)
        elif sum(map(_is_picture, context_parts(sample))) >= LEAST:
            yield sample


def _donors(sample: TaskSample, drawn: Sequence[TaskSample], seed: int) -> list[Part]:
    """As many parts of the other samples as the traces need, pictures first."""
    others = [other for other in drawn if other.id != sample.id]
    start = _lot(f"{seed}:{sample.id}:donors")
    turned = [others[(start + i) % len(others)] for i in range(len(others))]
    pool = sorted((part for other in turned for part in context_parts(other)), key=_is_picture, reverse=True)
    needed = len(context_parts(sample)) - 1
    if len(pool) < needed:
        raise TaskDataError(
            f"item {sample.id} needs {needed} donors, the others hold {len(pool)}: draw more items"
        )
    return pool[:needed]


def _lot(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _is_picture(part: Part) -> bool:
    return isinstance(part, Picture)
