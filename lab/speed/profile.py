"""Where an operation spends its time, step by step.

A step is a function of Kamera with everything it calls outside of Kamera: a call of
``get_rope_index`` is a step of whoever makes it, down to the last tensor. Steps do not overlap, so their
shares add up.
"""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import kamera
from lab.speed.table import Row

TURNS = 10
"""How often the operation runs under the profiler."""
PACKAGE = Path(kamera.__file__).parent
_DEPTH = 8  # of calls outside of Kamera that are followed to a caller inside

Where = tuple[str, int, str]


class Entry(NamedTuple):
    """What the profiler says of one function: how often it was entered, seconds, and from where."""

    primitive: int
    calls: int
    own: float
    whole: float
    callers: Mapping[Where, tuple[int, int, float, float]]


Entries = Mapping[Where, Entry]


def profiled(before: Callable[[], Callable[[], object]], count: int) -> list[Row]:
    """The ``count`` slowest steps of what ``before`` prepares, each with its share of the whole."""
    watch = cProfile.Profile()
    for _ in range(TURNS):
        act = before()
        watch.enable()
        made = act()
        watch.disable()
        del made
    seen = pstats.Stats(watch).stats  # type: ignore[attr-defined]
    entries = {where: Entry(*entry) for where, entry in seen.items()}
    own = steps(entries)
    total = sum(entry.own for entry in entries.values())
    slowest = sorted(own.items(), key=lambda item: -item[1])[:count]
    return [
        {
            "step": _name(where),
            "calls": entries[where].calls / TURNS,
            "ms": 1e3 * seconds / TURNS,
            "share": seconds / total,
        }
        for where, seconds in slowest
    ]


def steps(entries: Entries) -> dict[Where, float]:
    """Seconds of every step: a function's whole time without that of the steps it calls."""
    own = {where: entry.whole for where, entry in entries.items() if _is_step(where)}
    for where in list(own):
        for caller, (_, _, _, whole) in entries[where].callers.items():
            for owner, share in _owners(entries, caller, _DEPTH).items():
                if owner != where:  # its own recursion is its own time
                    own[owner] -= whole * share
    return own


def _owners(entries: Entries, where: Where, depth: int) -> dict[Where, float]:
    """The steps in which a function runs, by how much of its time it spends in each."""
    if _is_step(where):
        return {where: 1.0}
    callers = entries[where].callers if depth and where in entries else {}
    total = sum(whole for _, _, _, whole in callers.values())
    found: dict[Where, float] = {}
    for caller, (_, _, _, whole) in callers.items():
        for owner, share in _owners(entries, caller, depth - 1).items():
            found[owner] = found.get(owner, 0.0) + (share * whole / total if total else 0.0)
    return found


def _is_step(where: Where) -> bool:
    path, _, name = where
    return PACKAGE in Path(path).parents and not name.startswith("<")


def _name(where: Where) -> str:
    path, _, name = where
    return f"{Path(path).relative_to(PACKAGE.parent).as_posix()} {name}"
