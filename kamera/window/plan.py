"""Plans of operations, made before anything runs: no tensor, no model, no file.

A plan is made from a window's seats, the rows of a catalogue and a policy. It lists every step and its cost;
`kamera.window.run` acts on it, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kamera.window.planner import Planner
from kamera.window.policy import Archive as ArchiveRule
from kamera.window.policy import OnLeave, PositionRule, ReusePolicy
from kamera.window.seats import Seat, Seats
from kamera.window.steps import Limits, Newcomer, Plan, Rows


def append(
    state: Seats,
    chunk: Newcomer,
    archive: ArchiveRule | None,
    rows: Rows,
    policy: ReusePolicy,
    limits: Limits,
) -> Plan:
    """A chunk at the tail: as `recall` if it is stored, else prefilled in context and archived."""
    planner = Planner(state, rows, policy, limits, heads={chunk.chunk_id: chunk.heads})
    if rows.has_canonical(chunk.chunk_id) or planner.base(chunk.chunk_id) is not None:
        return planner.plan("append", *planner.arrive(state, chunk), chunk.encodes)
    return planner.plan("append", *planner.arrive_new(state, chunk, archive), chunk.encodes)


def recall(
    state: Seats, chunk: Newcomer, move: bool, rows: Rows, policy: ReusePolicy, limits: Limits
) -> Plan:
    """An archived chunk at the tail; one that is in the window stays in place, unless ``move``."""
    planner, ids = Planner(state, rows, policy, limits), state.chunk_ids
    if chunk.chunk_id not in ids:
        return planner.plan("recall", *planner.arrive(state, chunk))
    index = len(ids) - 1 - ids[::-1].index(chunk.chunk_id)
    if move and index < len(ids) - 1:
        gone = planner.leave(state, [index], limits.rule)
        return planner.plan("recall", *planner.arrive(gone, chunk))
    note = f"chunk {chunk.chunk_id[:12]} is in view at slot {index}, where it stays"
    note = note if move else f"{note}: move=True brings it to the tail"
    return planner.plan("recall", state, state.seats[index].number, note=note)


def slide(state: Seats, n: int, rule: PositionRule, rows: Rows, policy: ReusePolicy, limits: Limits) -> Plan:
    """The ``n`` oldest chunks leave."""
    planner = Planner(state, rows, policy, limits)
    return planner.plan("slide", planner.leave(state, range(n), rule))


def evict(
    state: Seats, index: int, rule: PositionRule, rows: Rows, policy: ReusePolicy, limits: Limits
) -> Plan:
    """One chunk leaves."""
    planner = Planner(state, rows, policy, limits)
    return planner.plan("evict", planner.leave(state, [index], rule))


def reorder(state: Seats, order: Sequence[int], rows: Rows, policy: ReusePolicy, limits: Limits) -> Plan:
    """The chunks in another order; an unchanged prefix stays as it is."""
    planner = Planner(state, rows, policy, limits)
    same = 0
    while same < len(order) and order[same] == same:
        same += 1
    return planner.plan("reorder", planner.arranged(state, [state.seats[i] for i in order], same))


def arrange(
    state: Seats,
    wanted: Sequence[Seat | Newcomer],
    on_leave: OnLeave,
    rows: Rows,
    policy: ReusePolicy,
    limits: Limits,
    operation: str = "arrange",
) -> Plan:
    """Seats of the window and newcomers in the order ``wanted``; other seats leave.

    Chunks in front of the first change stay as they are. Those behind it are kept as they are ("keep"), or
    placed anew under the policy ("repair") or under a minimum of "exact" ("exact").
    """
    planner = Planner(state, rows, policy, limits)
    after = planner.rearranged(state, wanted, on_leave)
    encodes = sum(item.encodes for item in wanted if isinstance(item, Newcomer))
    return planner.plan(operation, after, encodes=encodes)


def condition(state: Seats, index: int, on: bool, rows: Rows, policy: ReusePolicy, limits: Limits) -> Plan:
    """A chunk shown clean (its canonical), or conditioned again."""
    planner, seat = Planner(state, rows, policy, limits), state.seats[index]
    if on != (seat.clean is None):
        seat = planner.switch(seat if on else planner.archived(seat), on)
    seats = (*state.seats[:index], seat, *state.seats[index + 1 :])
    return planner.plan("condition", replace(state, seats=seats), seat.number)


def without(state: Seats, index: int, rows: Rows, policy: ReusePolicy, limits: Limits) -> Plan:
    """The window as if a chunk had never been there: chunks behind it are placed anew, not kept."""
    planner = Planner(state, rows, policy, limits)
    staying = [s for i, s in enumerate(state.seats) if i != index]
    return planner.plan("without", planner.arranged(state, staying, index))


def kept(state: Seats, rows: Rows, policy: ReusePolicy, limits: Limits) -> Plan:
    """The same chunks, placed anew from the first that the policy does not keep."""
    planner = Planner(state, rows, policy, limits)

    def stays(seat: Seat) -> bool:
        proved = not seat.source.patched or policy.keeps_patch(seat.source.proof)
        return policy.keeps(seat.guarantee) and proved

    first = next((i for i, seat in enumerate(state.seats) if not stays(seat)), None)
    after = state if first is None else planner.arranged(state, state.seats, first)
    return planner.plan("load", after)
