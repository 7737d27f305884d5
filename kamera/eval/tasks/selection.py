"""Selection of a benchmark's samples: the first of each file, a random draw, a shard."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kamera.eval.tasks.sample import Problem, Task, TaskSample


@dataclass(frozen=True)
class Selection:
    """``limit`` samples of each annotation file; of these ``sample`` drawn by ``seed``; of these the
    ``shard`` "i/n", 1 ≤ i ≤ n.

    For one seed a smaller draw is a subset of a larger one. The n shards are a partition.
    """

    limit: int | None = None
    sample: int | None = None
    seed: int = 0
    shard: str = "1/1"

    def __post_init__(self) -> None:
        if self.sample is not None and self.sample < 1:
            raise ValueError(f"sample is {self.sample}: draw at least one")
        match = re.fullmatch(r"(\d+)/(\d+)", str(self.shard))
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"shard {self.shard!r}: give i/n with 1 <= i <= n, such as 1/4")


def select(selection: Selection, task: Task, data: Path) -> Iterator[tuple[int, TaskSample | Problem]]:
    """The selected samples of a set, each with its place among those of all shards, and problems.

    A random draw reads the set once, without its media.
    """
    drawn: frozenset[str] | None = None
    if selection.sample is not None:
        listed = task.list_samples(data, selection.limit)
        ids = [item.id for item in listed if isinstance(item, TaskSample)]
        drawn = frozenset(sorted(ids, key=partial(_rank, selection.seed))[: selection.sample])
    shard, shards = map(int, selection.shard.split("/"))
    place = -1
    for item in task.list_samples(data, selection.limit):
        if isinstance(item, Problem):
            yield place, item
        elif drawn is None or item.id in drawn:
            place += 1
            if place % shards == shard - 1:
                yield from ((place, shown) for shown in task.with_media(item))


def _rank(seed: int, id: str) -> bytes:
    return hashlib.sha256(f"{seed}/{id}".encode()).digest()
