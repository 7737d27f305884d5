"""Anticipation: what an append needs when the oldest chunks leave for it is prepared before it comes."""

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

logger = logging.getLogger(__name__)


@one_at_a_time
def anticipate(window: Contents) -> None:
    """Prepare, as later work, an `append` or `recall` for which the oldest chunks of a window must leave.

    The chunks that stay are placed behind their next antecedents as that operation would place them, if a
    chunk of the size of the last one does not fit into ``max_tokens``. The operation then runs its new chunk
    alone. One for which others leave, or none, or that finds the window changed, starts from the window as it
    stands; any operation ends the work. Returns at once; plans do not count on it. Nothing is prepared where
    departures run no forward (survivors are kept).
    """
    state, policy = window._state, window._terms.served
    last = state.facts[-1] if state.facts else None
    count = (
        0 if last is None else _leaving(window._stage, state, policy, Newcomer(last.chunk_id, last.length))
    )
    if not count:
        if window._preparation is not None:
            window._preparation.take()
        return
    stage = replace(window._stage, live=window._backbone.live(holds=True))
    window._preparation = window._preparation or Ahead(window._backbone)
    window._preparation.begin(partial(_depart, count, state, stage, policy))


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
    return Ready(Departure(state, count, outcome.state, stage), own)
