"""Anticipation: what a departure needs is prepared before it comes."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from kamera.errors import KameraError
from kamera.patches import Ahead, Ready
from kamera.trust import ReusePolicy
from kamera.window.audit import queue_audits, slots_to_audit
from kamera.window.contents import Contents, one_at_a_time
from kamera.window.memory import Holdings
from kamera.window.naming import NamedRequest
from kamera.window.report import Tally
from kamera.window.requests import Append, Newcomer, Recall, Request, Slide
from kamera.window.run import carry_out
from kamera.window.seating import count_leaving
from kamera.window.stage import Departure, Stage
from kamera.window.state import WindowState
from kamera.window.steps import Cost, Plan

logger = logging.getLogger(__name__)


@one_at_a_time
def prepare_departure(window: Contents) -> None:
    """`KameraWindow.anticipate`."""
    count = next_departure(window)
    if not count:
        if window._preparation is not None:
            window._preparation.take()
        return
    stage = replace(window._stage, live=window._backbone.live(holds=True))
    window._preparation = window._preparation or Ahead(window._backbone)
    window._preparation.begin(partial(_depart, count, window._state, stage, window._policy))


def next_departure(window: Contents) -> int:
    """The number of chunks that will probably leave next: for a chunk like the last one, or by a slide."""
    state = window._state
    last = state.facts[-1] if state.facts else None
    if last is None:
        return 0
    leaving = _leaving(window._stage, state, window._policy, Newcomer(last.chunk_id, last.length))
    slid = window._slid if window._slid < len(state.facts) else 0
    return leaving or slid


def anticipate_by_itself(window: Contents, plan: Plan, left: int) -> None:
    """After an operation by which ``left`` chunks left, prepare the next departure within a ledger.

    Each departure is worth what a prefix cache runs for it: the chunks that stay. A preparation costs as
    much, used or not, so a window that guesses wrong waits for its next departure.
    """
    if plan.operation not in ("append", "recall", "slide"):
        return
    staying = [seat.length for seat in plan.after.seats if seat.number != plan.arrived]
    if left:  # also where the departure itself was prepared, and is no part of the plan
        window._earned += sum(staying)
        window._slid = left if plan.operation == "slide" else 0
    policy = window._policy
    if plan.operation == "slide" or (policy.on_leave == "keep" and policy.minimum != "exact"):
        return
    count = next_departure(window) if window._earned else 0
    cost = sum([seat.length for seat in plan.after.seats[count:]])
    if count and cost <= window._earned:
        window._earned -= cost
        prepare_departure(window)


def _leaving(stage: Stage, state: WindowState, policy: ReusePolicy, chunk: Newcomer) -> int:
    """The number of oldest chunks that leave for a chunk; 0 for one that no window of this size holds."""
    limits = stage.limits(state, {}, policy)
    if limits.max_tokens is None or chunk.length > limits.max_tokens - limits.anchor:
        return 0
    return count_leaving(limits, state.seats, chunk)


def fits(ahead: Departure, request: Request, stage: Stage, state: WindowState, policy: ReusePolicy) -> bool:
    """True if an operation on ``state`` starts where as many chunks have left as it needs."""
    match request:
        case Append(content=Newcomer() as chunk) | Recall(chunk=Newcomer() as chunk):
            in_view = isinstance(request, Recall) and chunk.chunk_id in state.seats.chunk_ids
            same = ahead.before is state and not in_view
            return same and _leaving(stage, state, policy, chunk) == ahead.count
        case Slide(n):
            return ahead.before is state and n == ahead.count
        case _:
            return False


def _depart(count: int, state: WindowState, stage: Stage, policy: ReusePolicy) -> Ready[Departure] | None:
    """The window after a departure; None if no forward is needed."""
    named_request = NamedRequest(Slide(count))
    try:
        with stage.former.operation():
            plan = stage.plan(named_request, state, policy)
            if not plan.cost.tokens:
                return None
            outcome = carry_out(named_request, state, stage, policy, Tally(), plan)
            stage.show(outcome.state, Tally())
            queue_audits(stage, outcome.state, slots_to_audit(outcome.plan, outcome.state), policy.audit)
    except KameraError as error:
        logger.info("a window's next departure was not prepared: %s", error)
        return None
    old = Holdings.of(stage.former.anchor, state, stage.former.backbone.live())
    own = Holdings.of(stage.former.anchor, outcome.state, stage.live).memory([old]).own
    done = replace(plan, steps=(), cost=Cost(), later=Cost())
    return Ready(Departure(state, count, done, outcome.state, stage), own)
