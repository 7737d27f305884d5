"""The chunks that stand on another one, and what re-instating them would run: plans, from rows alone.

A chunk that leaves or changes was an antecedent of those behind it. Each of these is placed anew behind its
remaining antecedents, and is an antecedent in turn (appendix E).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kamera.ops import digest
from kamera.trust import ReusePolicy
from kamera.window.naming import NamedRequest
from kamera.window.requests import Arrange, Evict, Newcomer
from kamera.window.stage import Stage
from kamera.window.state import Slot, WindowState
from kamera.window.steps import Cost, Plan


@dataclass(frozen=True)
class Dependent:
    """A slot whose KV was conditioned on a chunk, and what it runs if that chunk left, or changed."""

    slot: Slot
    left: Cost
    changed: Cost


@dataclass(frozen=True)
class Cascade:
    """What stands on ``slot``: forwards and tokens if it left, or if one that was never seen took its place.

    Both are of all chunks behind it, blind ones too, which stood on nothing and are repaired all the same.
    ``plan`` is that of the departure with a repair: its cost is ``left``, and what the chunk itself runs when
    it leaves. The other chunk's own cost is not in ``changed``.
    """

    slot: Slot
    dependents: tuple[Dependent, ...]
    left: Cost
    changed: Cost
    plan: Plan


def cascade(
    stage: Stage, state: WindowState, policy: ReusePolicy, slots: Sequence[Slot], index: int
) -> Cascade:
    """The cascade behind the chunk at ``index`` of a window, which ``slots`` show. Runs nothing."""
    policy = replace(policy, on_leave="repair")
    gone, counts = slots[index], range(index + 1, len(slots) + 1)
    other = digest("kamera.changed.v1", gone.chunk_id)
    facts = {other: state.residents[index].facts}
    departures: list[Plan] = []
    changes: list[Cost] = []
    for count in counts:  # a repair of the first chunks is the beginning of a repair of all
        there = state if count == len(slots) else replace(state, residents=state.residents[:count])
        departures.append(stage.plan(NamedRequest(Evict(index)), there, policy))
        order = (*range(index), Newcomer(other, gone.length), *range(index + 1, count))
        changes.append(stage.plan(NamedRequest(Arrange(order), facts), there, policy).cost)
    left = [_beyond(*pair) for pair in pairwise(plan.cost for plan in departures)]
    changed = [_beyond(*pair) for pair in pairwise(changes)]
    behind = zip(slots[index + 1 :], left, changed, strict=True)
    return Cascade(
        gone,
        tuple(Dependent(*costs) for costs in behind if gone.chunk_id in costs[0].antecedents),
        _beyond(departures[0].cost, departures[-1].cost),
        _beyond(changes[0], changes[-1]),
        departures[-1],
    )


def _beyond(less: Cost, more: Cost) -> Cost:
    """Forwards and tokens of ``more`` that are not in ``less``."""
    return Cost(more.forwards - less.forwards, more.tokens - less.tokens)
