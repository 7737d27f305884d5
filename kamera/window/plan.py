"""Plans of operations, made before anything runs: no tensor, no model, no file.

A plan is made from a request and a view: a window's seats, the rows of a catalogue, a policy and limits. It
lists every step and its cost; `kamera.window.run` acts on it, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from kamera.window.planner import Planner
from kamera.window.requests import (
    Append,
    Arrange,
    Condition,
    Evict,
    Newcomer,
    Recall,
    Reorder,
    Request,
    Restore,
    Slide,
    Without,
)
from kamera.window.seats import SHORTEST_KEPT, Seat, Seats
from kamera.window.steps import Archive, Plan, Prefill, View


def plan(request: Request, view: View) -> Plan:
    """The plan of a request with names alone: newcomers for contents, indices for slots.

    Raises the refusals of the operation: WindowFull, NotRelocatable, PolicyRefused.
    """
    seats, policy = view.seats, view.policy
    patches = policy.patches or not isinstance(request, Arrange) or request.archive
    planner = Planner(request, seats, view.rows, policy, view.limits, patches)
    match request:
        case Append(content=Newcomer() as chunk):
            planner.heads[chunk.chunk_id] = chunk.heads
            stored = planner.rows.has_canonical(chunk.chunk_id) or planner.base(chunk.chunk_id) is not None
            done = (
                planner.arrive_stored(seats, chunk)
                if stored
                else planner.arrive_new(seats, chunk, request.archive)
            )
            return planner.plan("append", *done, chunk.encodes)
        case Recall(chunk=Newcomer() as chunk):
            return _recall(planner, seats, chunk, request.move)
        case Slide(n):
            return planner.plan("slide", planner.leave(seats, range(n)))
        case Evict(int(index)):
            return planner.plan("evict", planner.leave(seats, [index]))
        case Reorder(order):
            same = 0
            while same < len(order) and order[same] == same:
                same += 1
            after = planner.arranged(seats, [seats.seats[i] for i in order], same)
            return planner.plan("reorder", after)
        case Arrange():
            return _arrange(planner, seats, request)
        case Condition(int(index), on):
            return _condition(planner, seats, index, on)
        case Without(index):
            staying = [s for i, s in enumerate(seats.seats) if i != index]
            return planner.plan("without", planner.arranged(seats, staying, index))
        case Restore():
            return _restore(planner, seats)
        case _:
            raise ValueError(f"{type(request).__name__} is not planned by itself: name its contents first")


def _recall(planner: Planner, seats: Seats, chunk: Newcomer, move: bool) -> Plan:
    """An archived chunk at the tail; one that is in the window stays in place, unless it is to move."""
    ids = seats.chunk_ids
    if chunk.chunk_id not in ids:
        return planner.plan("recall", *planner.arrive_stored(seats, chunk))
    index = len(ids) - 1 - ids[::-1].index(chunk.chunk_id)
    if move and index < len(ids) - 1:
        gone = planner.leave(seats, [index])
        return planner.plan("recall", *planner.arrive_stored(gone, chunk))
    note = f"chunk {chunk.chunk_id[:12]} is in view at slot {index}, where it stays"
    note = note if move else f"{note}: move=True brings it to the tail"
    return planner.plan("recall", seats, seats.seats[index].number, note=note)


def _named(seats: Seats, order: Sequence[object]) -> list[Seat | Newcomer]:
    wanted: list[Seat | Newcomer] = []
    for item in order:
        assert isinstance(item, int | Newcomer), "a request is planned with names alone"
        wanted.append(seats.seats[item] if isinstance(item, int) else item)
    return wanted


def _arrange(planner: Planner, seats: Seats, request: Arrange) -> Plan:
    """Seats of the window and newcomers in the order asked for; other seats leave.

    Chunks in front of the first change stay as they are. Those behind it are kept as they are ("keep"), or
    placed anew under the policy ("repair") or under a minimum of "exact" ("exact").
    """
    wanted = _named(seats, request.order)
    after = planner.rearranged(seats, wanted, request.on_leave)
    _owe_canonicals(planner, request.recurring)
    encodes = sum(item.encodes for item in wanted if isinstance(item, Newcomer))
    return planner.plan(request.operation, after, encodes=encodes)


def _owe_canonicals(planner: Planner, recurring: Collection[str]) -> None:
    """Leave to later work the canonicals of recurring chunks that are prefilled, if none is made anyway."""
    if planner.policy.on_miss not in ("form", "sample") or planner.policy.forms == "always":
        return
    owed, rows = {seat.chunk_id for seat in planner.price.owed}, planner.rows
    for seat in [step.seat for step in planner.steps if isinstance(step, Prefill)]:
        short = seat.chunk_id in planner.limits.glue and seat.length < SHORTEST_KEPT
        known = seat.chunk_id in owed or short or seat.source.canonical
        if seat.chunk_id not in recurring or known or planner.base(seat.chunk_id) is not None:
            continue
        if not rows.has_canonical(seat.chunk_id):
            owed.add(seat.chunk_id)
            planner.owed.append(Archive(seat.number, True, later=True))
            planner.price.owes(seat)


def _condition(planner: Planner, seats: Seats, index: int, on: bool) -> Plan:
    """A chunk shown clean (its canonical), or conditioned again."""
    seat = seats.seats[index]
    if on != (seat.clean is None):
        seat = planner.switch(seat if on else planner.archived(seat), on)
    now = (*seats.seats[:index], seat, *seats.seats[index + 1 :])
    return planner.plan("condition", replace(seats, seats=now), seat.number)


def _restore(planner: Planner, seats: Seats) -> Plan:
    """The same chunks, placed anew from the first that the policy does not keep."""
    policy = planner.policy

    def stays(seat: Seat) -> bool:
        proved = not seat.source.patch or policy.keeps_patch(seat.source.proof)
        return policy.keeps(seat.guarantee) and proved

    first = next((i for i, seat in enumerate(seats.seats) if not stays(seat)), None)
    after = seats if first is None else planner.arranged(seats, seats.seats, first)
    return planner.plan("load", after)
