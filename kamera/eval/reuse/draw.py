"""Items for a benchmark: drawn from a source by a seed, given donors and traces."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from kamera.errors import TaskDataError
from kamera.eval.reuse.item import LEAST, Item
from kamera.eval.reuse.sources import NAMES, SOURCES, TESTBED, world
from kamera.eval.reuse.traces import with_traces
from kamera.eval.tasks.sample import Passage, Picture, Problem

UNITS = 8
"""Frames, pages or screenshots of a window, where the set leaves the choice."""

FILLER = world.FILLER
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
        for item in world.read(count, seed):
            yield with_traces(item, [name for name in item.units if name.startswith("donor-")], FILLER, seed)
        return
    if data is None:
        raise ValueError(f"source {source!r} needs --data, the set's folder as published")
    drawn, problems = _sample_items(SOURCES[source](data, units), count, seed)
    yield from problems
    if len(drawn) < 2:
        raise TaskDataError(f"{data}: {len(drawn)} items with {LEAST} visual units: donors need two at least")
    for item in drawn:
        donors = _donors(item, drawn, seed)
        whole = replace(item, units={**item.units, **donors, FILLER: Passage(_NOTHING)})
        yield with_traces(whole, list(donors), FILLER, seed)


def _sample_items(items: Iterator[Item | Problem], count: int, seed: int) -> tuple[list[Item], list[Problem]]:
    """The ``count`` items of lowest digest, by id, and the problems of all."""
    kept: list[tuple[int, str, Item]] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for item in items:
        if isinstance(item, Problem):
            problems.append(item)
            continue
        if item.id in seen:
            problems.append(Problem(item.id, "occurs twice"))
            continue
        seen.add(item.id)
        if sum(map(_is_picture, item.units.values())) < LEAST:
            continue
        lot = int.from_bytes(hashlib.sha256(f"{seed}:{item.id}".encode()).digest()[:8], "big")
        heapq.heappush(kept, (-lot, item.id, item))
        if len(kept) > count:
            heapq.heappop(kept)
    return [item for _, _, item in sorted(kept, key=itemgetter(1))], problems


def _donors(item: Item, drawn: Sequence[Item], seed: int) -> dict[str, Any]:
    """As many units of the other items as the traces need, pictures first."""
    others = [other for other in drawn if other.id != item.id]
    start = int.from_bytes(hashlib.sha256(f"{seed}:{item.id}:donors".encode()).digest()[:8], "big")
    turned = [others[(start + i) % len(others)] for i in range(len(others))]
    pool = [part for other in turned for part in other.units.values()]
    pool.sort(key=_is_picture, reverse=True)  # stable
    needed = len(item.window) - 1
    if len(pool) < needed:
        raise TaskDataError(
            f"item {item.id} needs {needed} donors, the others hold {len(pool)}: draw more items"
        )
    return {f"donor-{i}": pool[i] for i in range(needed)}


def _is_picture(part: Passage | Picture) -> bool:
    return isinstance(part, Picture)
