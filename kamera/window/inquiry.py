"""Questions that are answered at the end of an operation, in the forward of its last prefills."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kamera.window.report import Report
from kamera.window.state import WindowState
from kamera.window.steps import Archive, Harvest, Keep, Plan, Prefill


@dataclass(frozen=True, eq=False)
class Inquiry:
    """A question: token ids ``[tokens]``, options of its answer, and the tokens expected of both."""

    ids: torch.Tensor
    options: Mapping[str, Any]
    room: int


class Response(NamedTuple):
    """An answer, as text or without a processor as token ids ``[new]``, and the operation's report."""

    answer: str | torch.Tensor
    report: Report


class Ran(NamedTuple):
    """A window after a plan, and the answer's tokens ``[sequences, new]`` if there was an `Inquiry`."""

    state: WindowState
    answer: torch.Tensor | None


def last_run(plan: Plan) -> Prefill | None:
    """The first of the prefills at the tail of the window after which nothing runs; None without any.

    The question shares a forward with them: what comes after it is later work.
    """
    acting = [step for step in plan.steps if not _waits(step)]
    first = len(acting)
    while first and isinstance(acting[first - 1], Prefill):
        first -= 1
        step = acting[first]
        assert isinstance(step, Prefill), "looked at above"
        if not step.joined:
            numbers = [*step.before.seats, *(s.seat for s in acting[first:] if isinstance(s, Prefill))]
            at_the_tail = [s.number for s in numbers] == [s.number for s in plan.after.seats]
            return step if at_the_tail and step.before.frame == plan.after.frame else None
    return None


def _waits(step: object) -> bool:
    return isinstance(step, Keep) or (isinstance(step, Archive | Harvest) and step.later)
