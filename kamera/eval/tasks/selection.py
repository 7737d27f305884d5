"""Selection of a benchmark's samples: the first of each file, a random draw, a shard."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kamera.eval.tasks.sample import Task


@dataclass(frozen=True)
class Selection:
    """``limit`` samples of each annotation file; of these ``sample`` drawn by ``seed``; of these the
    shard ``shard`` = (i, n), 1 ≤ i ≤ n.

    For one seed a smaller draw is a subset of a larger one. The n shards are a partition.
    """

    limit: int | None = None
    sample: int | None = None
    seed: int = 0
    shard: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.sample is not None and self.sample < 1:
            raise ValueError(f"sample is {self.sample}: draw at least one")
        if self.shard is not None and not 1 <= self.shard[0] <= self.shard[1]:
            raise ValueError(f"shard {self.shard[0]}/{self.shard[1]}: give i/n with 1 <= i <= n")

    def document(self) -> dict[str, Any]:
        """The selection as JSON values."""
        shard = None if self.shard is None else f"{self.shard[0]}/{self.shard[1]}"
        return {"limit": self.limit, "sample": self.sample, "seed": self.seed, "shard": shard}


class Chooser:
    """A selection from one set: call `wanted` once for every sample, in file order.

    A random draw reads the set once, without its media.
    """

    def __init__(self, selection: Selection, task: Task, data: Path) -> None:
        self.places: dict[str, int] = {}
        self._shard = selection.shard or (1, 1)
        self._drawn: frozenset[str] | None = None
        if selection.sample is not None:
            ids: list[str] = []
            for _ in task.load(data, selection.limit, partial(_take_id, ids)):
                pass
            ranked = sorted(set(ids), key=partial(_rank, selection.seed))
            self._drawn = frozenset(ranked[: selection.sample])

    def wanted(self, id: str) -> bool:
        """True if this run asks the sample."""
        if self._drawn is not None and id not in self._drawn:
            return False
        place = self.places.setdefault(id, len(self.places))
        return place % self._shard[1] == self._shard[0] - 1


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/8"`` as (2, 8). Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise ValueError(f"shard {text!r}: give i/n, such as 1/4")
    return int(match[1]), int(match[2])


def _take_id(ids: list[str], id: str) -> bool:
    ids.append(id)
    return False


def _rank(seed: int, id: str) -> bytes:
    return hashlib.sha256(f"{seed}/{id}".encode()).digest()
