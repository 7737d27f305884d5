"""Makes plans of operations, chunk by chunk, before anything runs: no tensor, no model, no file.

A plan is made from a request and a view: a window's seats, the rows of a catalogue, a policy and limits. It
lists every step and its cost; `kamera.window.run` acts on it, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from kamera.trust import ArchiveRule, OnLeave, ReusePolicy
from kamera.window.placer import Placer
from kamera.window.requests import (
    Append,
    Arrange,
    Condition,
    Evict,
    Newcomer,
    Recall,
    Reorder,
    Request,
    Slide,
    Without,
)
from kamera.window.seating import check_room, check_stands, choose_frame, count_leaving, tail
from kamera.window.seats import Seat, Seats, Spot
from kamera.window.steps import Plan, Prefill, View, cost_of


def plan(request: Request, view: View) -> Plan:
    """The plan of a request with names alone: newcomers for contents, indices for slots.

    Raises the refusals of the operation: WindowFull, NotRelocatable, PolicyRefused.
    """
    seats, policy = view.seats, view.policy
    patches = policy.admits("patched", "near") or not isinstance(request, Arrange) or request.archive
    planner = Planner(request, seats, view.rows, policy, view.limits, patches)
    match request:
        case Append(content=Newcomer() as chunk):
            planner.heads[chunk.chunk_id] = chunk.heads
            has_base = planner.base(chunk.chunk_id) is not None
            is_stored = planner.rows.has_canonical(chunk.chunk_id) or has_base
            arrival = (
                planner.arrive_stored(seats, chunk)
                if is_stored
                else planner.arrive_new(seats, chunk, request.archive)
            )
            return planner.finish("append", *arrival, chunk.encodes)
        case Recall(chunk=Newcomer() as chunk):
            return _recall(planner, seats, chunk, request.move)
        case Slide(n):
            return planner.finish("slide", planner.leave(seats, range(n)))
        case Evict(int(index)):
            return planner.finish("evict", planner.leave(seats, [index]))
        case Reorder(order):
            same = next((i for i, index in enumerate(order) if index != i), len(order))
            after = planner.arrange(seats, [seats.seats[i] for i in order], same)
            return planner.finish("reorder", after)
        case Arrange():
            return _arrange(planner, seats, request)
        case Condition(int(index), on):
            return _condition(planner, seats, index, on)
        case Without(index):
            others = [s for i, s in enumerate(seats.seats) if i != index]
            return planner.finish("without", planner.arrange(seats, others, index))
        case _:
            raise ValueError(f"{type(request).__name__} is not planned by itself: name its contents first")


def _recall(planner: Planner, seats: Seats, chunk: Newcomer, move: bool) -> Plan:
    """An archived chunk at the tail; one that is in the window stays in place, unless it is to move."""
    ids = seats.chunk_ids
    if chunk.chunk_id not in ids:
        return planner.finish("recall", *planner.arrive_stored(seats, chunk))
    index = len(ids) - 1 - ids[::-1].index(chunk.chunk_id)
    if move and index < len(ids) - 1:
        rest = planner.leave(seats, [index])
        return planner.finish("recall", *planner.arrive_stored(rest, chunk))
    note = f"chunk {chunk.chunk_id[:12]} is in view at slot {index}, where it stays"
    note = note if move else f"{note}: move=True brings it to the tail"
    return planner.finish("recall", seats, seats.seats[index].number, note=note)


def _name(seats: Seats, order: Sequence[object]) -> list[Seat | Newcomer]:
    items: list[Seat | Newcomer] = []
    for item in order:
        assert isinstance(item, int | Newcomer), "a request is planned with names alone"
        items.append(seats.seats[item] if isinstance(item, int) else item)
    return items


def _arrange(planner: Planner, seats: Seats, request: Arrange) -> Plan:
    """Seats of the window and newcomers in the order asked for; other seats leave.

    Chunks in front of the first change stay as they are. Those behind it are kept as they are ("keep"), or
    placed anew under the policy ("repair") or under a minimum of "exact" ("exact").
    """
    items = _name(seats, request.order)
    after = planner.rearrange(seats, items, request.on_leave)
    _owe_canonicals(planner, request.recurring)
    encodes = sum(item.encodes for item in items if isinstance(item, Newcomer))
    return planner.finish(request.operation, after, encodes=encodes)


def _owe_canonicals(planner: Planner, recurring: Collection[str]) -> None:
    """Leave to later work the canonicals of recurring chunks that are prefilled, if none is made anyway."""
    if planner.policy.on_miss != "form" or planner.policy.forms == "always":
        return
    for seat in [step.seat for step in planner.steps if isinstance(step, Prefill)]:
        short = seat.chunk_id in planner.limits.glue
        is_settled = seat.chunk_id in planner.late_seats or short or seat.source.canonical
        if seat.chunk_id not in recurring or is_settled or planner.base(seat.chunk_id) is not None:
            continue
        if not planner.rows.has_canonical(seat.chunk_id):
            planner.leave_canonical_for_later(seat)


def _condition(planner: Planner, seats: Seats, index: int, on: bool) -> Plan:
    """A chunk shown clean (its canonical), or conditioned again."""
    seat = seats.seats[index]
    if on != (seat.clean is None):
        seat = planner.switch(seat if on else planner.archive(seat), on)
    row = (*seats.seats[:index], seat, *seats.seats[index + 1 :])
    return planner.finish("condition", replace(seats, seats=row), seat.number)


@dataclass
class Planner(Placer):
    """Plans one request."""

    def finish(
        self, operation: str, after: Seats, arrived: int | None = None, encodes: int = 0, note: str = ""
    ) -> Plan:
        """The plan that leads to ``after``. Raises NotRelocatable for a chunk that cannot move there."""
        old_ids = set(map(id, self.before.seats))
        for seat in after.seats:
            if id(seat) not in old_ids:
                check_stands(self.limits, seat)
        return Plan(
            self.request,
            self.policy,
            operation,
            self.before,
            after.with_said(None),
            (*self.steps, *self.late_steps),
            cost_of(self.steps, encodes),
            arrived,
            tuple(self.left_numbers),
            tuple(dict.fromkeys([*((note,) if note else ()), *self._notes])),
            self.later_cost(),
        )

    # -- arriving ------------------------------------------------------------------------------

    def arrive_stored(self, state: Seats, chunk: Newcomer) -> tuple[Seats, int]:
        """Place an archived chunk at the tail by the best means the policy admits."""
        state, spot = tail(self.limits, self._make_room(state, chunk), chunk)
        seat = self.place_chunk(chunk, state, spot)
        return state.with_seat(seat), seat.number

    def arrive_new(self, state: Seats, chunk: Newcomer, archive: ArchiveRule | None) -> tuple[Seats, int]:
        """Prefill an unseen chunk in context at the tail.

        It is archived and harvested now or when it leaves; None: as the policy's `forms` says.
        """
        state, spot = tail(self.limits, self._make_room(state, chunk), chunk)
        if not state.seats:  # leading: its prefill behind the anchor is the canonical itself
            seat = self.place_chunk(chunk, state, spot)
        else:
            seat = self._prefill(chunk, state, spot, new=True, reason="new")
            if archive == "now" or (archive is None and self.policy.forms == "always"):
                seat = self.archive(seat)
            elif archive is None and self.policy.on_leave == "keep" and self.policy.minimum != "exact":
                self.leave_canonical_for_later(seat)  # when it leads it is served from that
                seat = replace(seat, archived=True)
        state = state.with_seat(seat)
        if self.rows.has_departed:
            self.follow(state, len(state.seats) - 1)
        return state, seat.number

    # -- leaving -------------------------------------------------------------------------------

    def leave(self, state: Seats, indices: Sequence[int]) -> Seats:
        """Remove chunks; those behind them survive, relocated.

        Under another ``on_leave`` of the policy than to keep them they are placed anew instead. The frame
        moves with the larger part of the remaining chunks, so that its keys are not rotated.
        """
        leavers = set(indices)
        for i in indices:
            self.left_numbers.append(self.archive_leaving(state.seats[i]).number)
        first = min(indices)
        others = [s for i, s in enumerate(state.seats) if i not in leavers]
        on_leave = self._on_leave(self.policy.on_leave)
        if on_leave == "repair":
            return self.arrange(state, others, first, self.policy.as_repairing())
        if on_leave == "exact":
            first = next((i for i, s in enumerate(others[:first]) if s.guarantee != "exact"), first)
            return self.arrange(state, others, first, self.policy.as_exact())
        frame, seats = choose_frame(
            self.limits, state, others, self.limits.places.compact([c.chunk_id for c in others])
        )
        after = Seats(tuple(seats[:first]), frame)
        for seat in seats[first:]:
            after = after.with_seat(self.stay(seat, after))
        for i in range(first, len(after.seats)):
            self.follow(after, i)
        return after

    # -- rearranging ---------------------------------------------------------------------------

    def arrange(
        self,
        state: Seats,
        wanted: Sequence[Seat | Newcomer],
        same: int,
        own: ReusePolicy | None = None,
        keep: bool = False,
    ) -> Seats:
        """``wanted`` at compact positions; from index ``same`` on they are placed anew.

        ``own``: the policy for chunks of the window, which ``keep`` keeps as they are.
        """
        spots, policy = self.limits.places.compact([c.chunk_id for c in wanted]), self.policy
        old_seats = {i: s for i, s in enumerate(wanted) if isinstance(s, Seat) and (keep or i < same)}
        others = [spot for i, spot in enumerate(spots) if i not in old_seats]
        compact = [*(spots[i] for i in old_seats), *others]
        frame, seats = choose_frame(self.limits, state, list(old_seats.values()), compact)
        new_seats = dict(zip(old_seats, seats, strict=True))
        new = Seats(tuple(seats[:same]), frame)
        if new.frame == state.frame and same == len(state.seats):
            new = state  # what it knows of its seats is known
        for i, item in enumerate(wanted[same:], same):
            self.policy = own if own is not None and isinstance(item, Seat) else policy
            stays = self.stay(self._spend(new_seats[i]), new) if i in new_seats else None
            new = new.with_seat(stays or self.place_anew(item, new, spots[i].shift(frame)))
        self.policy = policy
        return new

    def rearrange(self, state: Seats, wanted: Sequence[Seat | Newcomer], on_leave: OnLeave) -> Seats:
        """The seats after `Arrange`."""
        same = 0
        while same < min(len(wanted), len(state.seats)) and wanted[same] is state.seats[same]:
            same += 1
        on_leave, policy = self._on_leave(on_leave), self.policy
        if on_leave == "exact":
            self.policy = self.policy.as_exact()
            same = next((i for i, s in enumerate(state.seats[:same]) if s.guarantee != "exact"), same)
        self.heads |= {c.chunk_id: c.heads for c in wanted if isinstance(c, Newcomer) and c.heads}
        numbers = {item.number for item in wanted if isinstance(item, Seat)}
        self.left_numbers += [self.archive_leaving(s).number for s in state.seats if s.number not in numbers]
        check_room(self.limits, wanted)
        after = self.arrange(state, wanted, same, self.policy.as_repairing(), on_leave == "keep")
        self.policy = policy
        return after

    def place_anew(self, item: Seat | Newcomer, before: Seats, spot: Spot) -> Seat:
        """A chunk of `rearrange` that is placed anew: one of the window, or a newcomer."""
        if isinstance(item, Seat):
            item = self._spend(item)
            return self.place_chunk(item, before, spot)
        return self._take(item, before, spot) or self.place_chunk(item, before, spot, archived=False)

    def _on_leave(self, on_leave: OnLeave) -> OnLeave:
        """The treatment of chunks that stay: a window that serves no survivors keeps none."""
        if self.policy.minimum == "exact":
            return "exact"
        return "repair" if on_leave == "keep" and not self.policy.keeps("survivor") else on_leave

    # -- inside --------------------------------------------------------------------------------

    def _make_room(self, state: Seats, chunk: Newcomer) -> Seats:
        indices = range(count_leaving(self.limits, state, chunk))
        return self.leave(state, indices) if indices else state
