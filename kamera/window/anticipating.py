"""Anticipation: what an append needs when the oldest chunks leave for it is prepared before it comes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from kamera.errors import KameraError
from kamera.patches import Ahead
from kamera.window.audit import hand_over, served_by
from kamera.window.bounds import Bounds, carried_out
from kamera.window.cutting import Cuttable
from kamera.window.memory import Holdings
from kamera.window.naming import Named
from kamera.window.policy import ReusePolicy
from kamera.window.report import Tally
from kamera.window.requests import Append, Newcomer, Recall, Request, Slide
from kamera.window.seating import overflow
from kamera.window.serial import serial
from kamera.window.stage import Stage
from kamera.window.state import WindowState
from kamera.window.steps import Plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Departed:
    """A window ``before`` it and after its ``count`` oldest chunks have left, on a live cache of its own."""

    before: WindowState
    count: int
    state: WindowState
    stage: Stage


Departures = Ahead[Departed]
"""What a window has prepared."""


class Anticipating(Cuttable):
    """A window that prepares the departures it can foresee."""

    _ahead: Departures

    @serial
    def anticipate(self) -> None:
        """Prepare, as later work, an `append` or `recall` for which the oldest chunks must leave.

        The chunks that stay are placed behind their next antecedents as that operation would place them, if a
        chunk of the size of the last one does not fit into ``max_tokens``. The operation then runs its new
        chunk alone. One for which others leave, or none, or that finds the window changed, starts from the
        window as it stands; any operation ends the work. Returns at once; plans do not count on it. Nothing
        is prepared where departures run no forward (survivors are kept).
        """
        last = self._state.residents[-1].facts if self._state.residents else None
        count = 0 if last is None else self._leaving(Newcomer(last.chunk_id, last.length))
        if not count:
            self._ahead.take()
            return
        stage = replace(self._stage, live=self.backbone.live(holds=True))
        state, bounds, policy = self._state, self._bounds, self.policy
        self._ahead.begin(lambda: _departed(count, state, stage, bounds, policy))

    # -- inside --------------------------------------------------------------------------------

    def _leaving(self, chunk: Newcomer) -> int:
        """The number of oldest chunks that leave for a chunk; 0 for one that no window of this size holds."""
        limits = self._bounds.limits(self._stage, self._state, {}, self.policy, lambda _: False)
        if limits.max_tokens is None or chunk.length > limits.max_tokens - limits.anchor:
            return 0
        return overflow(limits, self._state.seats, chunk)

    def _start(self, request: Request, plan: Plan | None) -> tuple[WindowState, Stage]:
        """Where an operation starts: the window as it is, or without the chunks that leave for it."""
        ahead, here = self._ahead.take(), (self._state, self._stage)
        match request:
            case Append(content=Newcomer() as chunk) | Recall(chunk=Newcomer() as chunk):
                if ahead is None or plan is not None or ahead.before is not self._state:
                    return here
                in_view = isinstance(request, Recall) and chunk.chunk_id in self._state.chunk_ids
                if in_view or self._leaving(chunk) != ahead.count:
                    return here
                return ahead.state, ahead.stage
            case _:
                return here


def _departed(
    count: int, state: WindowState, stage: Stage, bounds: Bounds, policy: ReusePolicy
) -> tuple[Departed, int] | None:
    """The window after a departure, and the bytes that were made for it; None if no forward is needed."""
    named = Named(Slide(count, bounds.rule))
    try:
        with stage.former.operation():
            plan = bounds.plan(named, stage, state, policy)
            if not plan.cost.tokens:
                return None
            done = carried_out(named, state, bounds, stage, policy, Tally(), plan)
            stage.show(done.state, Tally())
            hand_over(stage, done.state, served_by(done.plan, done.state), policy.audit)
    except KameraError as error:
        logger.info("a window's next departure was not prepared: %s", error)
        return None
    old = Holdings.of(stage.former.anchor, state, stage.former.backbone.live())
    own = Holdings.of(stage.former.anchor, done.state, stage.live).memory([old]).own
    return Departed(state, count, done.state, stage), own
