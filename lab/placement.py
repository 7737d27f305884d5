"""Places chunks in the order in which the least is run: from rows alone, without a tensor (appendix E).

A patch is stored behind antecedents in their order, so what a chunk costs depends on the order before it only
as far as a row names that order. Orders of the same chunks that no row names are one state; among named ones
each is a state of its own. A walk over the states, chunk by chunk, prices each step with the planner itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

from kamera import Chunk, KameraWindow
from kamera.errors import PolicyRefused, WindowFull
from kamera.trust import Guarantee, ReusePolicy
from kamera.window import Arrange, terms_in_force
from kamera.window.plan import Planner
from kamera.window.requests import Newcomer, Request
from kamera.window.seating import canonical_source
from kamera.window.seats import Seat, Seats, footing
from kamera.window.steps import Limits, Prefill, Sample, Step, View, cost_of

EXACT_UP_TO = 8
"""Number of chunks up to which every state is walked; for more, the `BEAM` most promising of each length."""

BEAM = 16

Item = Seat | Newcomer
Run = tuple[int, int]
"""Tokens run through the decoder, and forwards: the fewest tokens come first."""


def assembled(window: KameraWindow, chunks: Sequence[Chunk], max_tokens: int | None = None) -> Arrange:
    """The request that makes a window hold these chunks, in the order in which the least is run.

    One that stands in the window keeps the KV that it has there where it can; others of the window leave. Of
    more chunks than fit, those given first stand: each, in turn, if it still fits beside those before it.
    """
    there = {slot.chunk_id: slot for slot in window.slots}
    unique = {chunk.id: chunk for chunk in chunks}
    given = [there.get(name, chunk) for name, chunk in unique.items()]
    stage, state = window._stage, window._state
    named = window._names().name_request(Arrange(given))
    assert isinstance(named.request, Arrange)
    with stage.former.operation():
        policy = terms_in_force(window).served
        limits = stage.limits(state, named.facts(state), policy)
        view = View(state.seats, stage.former.catalogue, policy, limits)
        items = items_of(view.seats, named.request.order)
        stand = fitting(items, limits, max_tokens)
        order = [stand[i] for i in _OrderWalk(named.request, view, [items[i] for i in stand]).best()]
    return Arrange([given[i] for i in order])


def items_of(seats: Seats, order: Sequence[object]) -> list[Item]:
    """The chunks of an order with names alone."""
    return [seats.seats[item] if isinstance(item, int) else cast(Newcomer, item) for item in order]


def fitting(items: Sequence[Item], limits: Limits, max_tokens: int | None = None) -> list[int]:
    """Indices of the chunks that stand in the window: each one if it fits beside those that stand already.

    ``max_tokens`` bounds anchor and chunks together, as the window's own bound does. Raises WindowFull if
    none fits.
    """
    bounds = [bound for bound in (limits.max_tokens, max_tokens) if bound is not None]
    free, stand = min(bounds) - limits.anchor if bounds else math.inf, list[int]()
    for i, item in enumerate(items):
        if item.length <= free:
            stand.append(i)
            free -= item.length
    if not stand:
        raise WindowFull(f"none of {len(items)} chunks fits: raise max_tokens or cut them smaller")
    return stand


def placed(request: Arrange, view: View) -> Arrange:
    """A request with names alone, in the order in which a plan of it runs least.

    The fewest tokens count first, then the fewest forwards, then the order given. Exact up to `EXACT_UP_TO`
    chunks; for more it is never dearer than the order given. Later work is not counted. Without an order that
    the policy admits, the order given, whose plan is refused by name.
    """
    items = items_of(view.seats, request.order)
    best = _OrderWalk(request, view, items).best()
    return replace(request, order=tuple(request.order[i] for i in best))


@dataclass(frozen=True)
class _Ordered:
    """Chunks in order by index, as a plan would seat them, and what it ran for them.

    ``stands``: all of them stand as they stood.
    """

    order: tuple[int, ...]
    seats: Seats
    steps: tuple[Step, ...]
    run: Run
    stands: bool

    @property
    def rank(self) -> tuple[Run, tuple[int, ...]]:
        return self.run, self.order

    @property
    def runs(self) -> bool:
        """True if a forward of a sample may be joined to one that ran for the line."""
        return any(isinstance(step, Prefill | Sample) for step in self.steps)

    @property
    def follows(self) -> bool:
        """True if a forward of the next chunk may be joined to that of the last one."""
        last = self.steps[-1] if self.steps else None
        return isinstance(last, Prefill) and last.seat.number == self.seats.seats[-1].number


class _State(NamedTuple):
    """All on which the further cost of a line depends; ``names`` are its antecedents if rows name them."""

    chunks: frozenset[int]
    worth: Guarantee
    stands: bool
    follows: bool
    runs: bool
    names: tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class _OrderWalk:
    request: Request
    view: View
    items: Sequence[Item]

    def best(self) -> tuple[int, ...]:
        """The best order that is found, or the order given if the policy refuses each."""
        found = self._beam()
        if len(self.items) <= EXACT_UP_TO:
            found = self._exact(math.inf if found is None else found.run[0])
        return self._given if found is None else found.order

    # -- inside --------------------------------------------------------------------------------

    def _exact(self, most: float) -> _Ordered | None:
        """The best order, over all states that run at most so many tokens."""
        lines = [self._start]
        for _ in self.items:
            steps = self._steps(lines, restricted=False)
            lines = self._merged(line for line in steps if line.run[0] <= most)
        return min(lines, key=lambda line: line.rank, default=None)

    def _beam(self) -> _Ordered | None:
        """The best order that the most promising states lead to, or the order given."""
        lines = [self._start]
        ends = [self._start]  # the order given
        for _ in self.items:
            lines = self._merged(self._steps(lines, restricted=self._plain))
            lines = sorted(lines, key=self._promise)[:BEAM]
            ends += sorted(lines, key=self._at_most)[:1] if self._plain else ()
        likely = min(ends, key=self._at_most)
        whole = [*lines, *(self._finished(line) for line in (self._start, likely))]
        found = [line for line in whole if line is not None and len(line.order) == len(self.items)]
        return min(found, key=lambda line: line.rank, default=None)

    def _at_most(self, line: _Ordered) -> tuple[int, tuple[int, ...]]:
        """The tokens that a line comes to if each other chunk takes a forward."""
        return line.run[0] + sum(self.items[i].length for i in self._rest(line)), line.order

    @property
    def _given(self) -> tuple[int, ...]:
        return tuple(range(len(self.items)))

    @property
    def _start(self) -> _Ordered:
        return _Ordered((), Seats.home((), len(self.view.seats.frame)), (), (0, 0), stands=True)

    @cached_property
    def _policies(self) -> tuple[ReusePolicy, ReusePolicy]:
        """Those under which `Planner.rearrange` places newcomers and chunks of the window."""
        asked = self.view.policy
        if asked.minimum == "exact":
            asked = asked.as_exact()
        return asked, asked.as_repairing()

    def _policy(self, item: Item) -> ReusePolicy:
        return self._policies[isinstance(item, Seat)]

    @cached_property
    def _orders(self) -> list[frozenset[tuple[str, ...]]]:
        """Of each chunk, the antecedents behind which it has a patch, or its KV in the window, in order."""
        found = []
        for item in self.items:
            orders = set(self.view.rows.orders(item.chunk_id))
            if isinstance(item, Seat):
                orders.add(item.source.antecedents)
            found.append(frozenset(orders))
        return found

    @cached_property
    def _begun(self) -> list[frozenset[tuple[str, ...]]]:
        """Of each chunk, the beginnings of these."""
        return [frozenset(o[:n] for o in orders for n in range(len(o) + 1)) for orders in self._orders]

    @cached_property
    def _plain(self) -> bool:
        """True if what is not served behind an order that rows name takes a forward."""
        return not any(
            policy.admits("orbit")
            or (policy.max_divergence is not None and policy.admits("near"))
            or policy.admits("blind")
            or policy.on_miss == "blind"
            for policy in self._policies
        )

    def _rest(self, line: _Ordered) -> list[int]:
        there = set(line.order)
        return [i for i in self._given if i not in there]

    def _steps(self, lines: Iterable[_Ordered], restricted: bool) -> Iterable[_Ordered]:
        """Each line with each of the other chunks; ``restricted``: only where an order is still named."""
        for line in lines:
            for i in self._rest(line):
                if restricted and not self._named(line, i):
                    continue
                longer = self._longer(line, i)
                if longer is not None:
                    yield longer

    def _longer(self, line: _Ordered, i: int) -> _Ordered | None:
        """A line with one more chunk, priced by the planner; None if the policy refuses it there."""
        item, here = self.items[i], self.view.seats.seats
        at = len(line.order)
        stands = line.stands and at < len(here) and here[at] is item
        if stands and (self.view.policy.minimum != "exact" or here[at].guarantee == "exact"):
            (spot,) = self.view.limits.places.compact([*line.seats.chunk_ids, item.chunk_id])[at:]
            return _Ordered(
                (*line.order, i), line.seats.with_seat(here[at].at(spot)), (), line.run, stands=True
            )
        planner = Planner(
            self.request,
            self.view.seats,
            self.view.rows,
            self._policy(item),
            self.view.limits,
            patches=True,
            steps=list(line.steps),
        )
        home = canonical_source(self.view.limits, item.chunk_id).home
        try:
            seat = planner.place_anew(item, line.seats, home)
        except PolicyRefused:
            return None
        cost, order = cost_of(planner.steps), (*line.order, i)
        run = cost.tokens, cost.forwards
        return _Ordered(order, line.seats.with_seat(seat), tuple(planner.steps), run, stands=False)

    def _finished(self, line: _Ordered) -> _Ordered | None:
        """A line with all others in the order given: behind one that no row names, any costs as much."""
        done: _Ordered | None = line
        for i in self._rest(line):
            done = None if done is None else self._longer(done, i)
        return done

    def _named(self, line: _Ordered, i: int) -> bool:
        """True if chunk ``i`` may be served behind a line, or another one behind both."""
        names = (line.seats.chunk_ids, line.seats.lineage)
        if line.stands or any(name in self._orders[i] for name in names):
            return True
        longer = [(*name, self.items[i].chunk_id) for name in names]
        return any(name in self._begun[j] for name in longer for j in self._rest(line) if j != i)

    def _merged(self, lines: Iterable[_Ordered]) -> list[_Ordered]:
        """Of the lines in one state, the best."""
        best: dict[_State, _Ordered] = {}
        for line in lines:
            state = self._state(line)
            if state not in best or line.rank < best[state].rank:
                best[state] = line
        return list(best.values())

    def _state(self, line: _Ordered) -> _State:
        rest = self._rest(line)
        both = (line.seats.chunk_ids, line.seats.lineage)
        names = tuple(name if any(name in self._begun[i] for i in rest) else None for name in both)
        return _State(frozenset(line.order), footing(line.seats), line.stands, line.follows, line.runs, names)

    def _promise(self, line: _Ordered) -> tuple[int, Run, tuple[int, ...]]:
        """The fewest tokens that a line may come to, then what it has run."""
        names = (line.seats.chunk_ids, line.seats.lineage)
        lost = 0
        for i in self._rest(line) if self._plain else ():
            if not line.stands and not any(name in self._begun[i] for name in names):
                lost += self.items[i].length
        return line.run[0] + lost, line.run, line.order
