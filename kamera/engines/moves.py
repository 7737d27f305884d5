"""The writes that showing other spans needs, from sources, offsets and lengths alone: no tensor, no place."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import add, lt
from typing import NamedTuple


class Stand(NamedTuple):
    """A span as `plan_moves` sees it: its source, its offset from the source, and its length in tokens."""

    source: Hashable
    offset: tuple[int, ...]
    length: int


class Move(NamedTuple):
    """The writes for one wanted span.

    ``was`` is the index of the span in memory that it reuses, None if it is written whole. If ``turns``, its
    phased channels are rewritten from the source, since its offset has changed. ``writes`` if anything is
    computed for the span; otherwise it is at most copied to another place.
    """

    was: int | None
    turns: bool
    writes: bool


@dataclass(frozen=True)
class Written:
    """Bytes written by one `LiveKV.show`.

    ``bytes_turned`` are KV bytes of phased channels at an offset other than zero, ``bytes_patched`` bytes of
    the patch factors that were applied, ``bytes_copied`` KV bytes that were written unchanged.
    """

    bytes_turned: int = 0
    bytes_patched: int = 0
    bytes_copied: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(*map(add, vars(self).values(), vars(other).values()))


def plan_moves(standing: Sequence[Stand], wanted: Sequence[Stand]) -> list[Move]:
    """The move for each span of ``wanted`` while the spans of ``standing`` are in memory.

    Spans of the same source are reused as far as they keep their order: the largest number that does.
    """
    seats: dict[Hashable, list[int]] = {}
    for i in range(len(standing) - 1, -1, -1):
        seats.setdefault(standing[i].source, []).append(i)
    matches = []
    for span in wanted:
        indices = seats.get(span.source)
        matches.append(indices.pop() if indices else None)
    reused_indices = _in_order(matches)
    whole, out = Move(None, False, True), list[Move]()
    for was, span in zip(matches, wanted, strict=True):
        if was is None or was not in reused_indices:
            out.append(whole)
        else:
            turns = standing[was].offset != span.offset
            out.append(Move(was, turns, turns))
    return out


def _in_order(indices: Sequence[int | None]) -> set[int]:
    """The indices of a longest ascending run through ``indices``, gaps allowed."""
    numbers = [i for i in indices if i is not None]
    if all(map(lt, numbers, numbers[1:])):
        return set(numbers)
    ends: list[int] = []  # the least index a run of each length ends with
    predecessors: dict[int, int | None] = {}
    for i in numbers:
        at = bisect_left(ends, i)
        predecessors[i] = ends[at - 1] if at else None
        ends[at : at + 1] = [i]
    last: int | None = ends[-1]
    out = set()
    while last is not None:
        out.add(last)
        last = predecessors[last]
    return out
