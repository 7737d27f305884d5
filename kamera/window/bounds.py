"""The bounds of a window, and the loop that plans an operation and runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kamera.patches import Facts
from kamera.window.inquiry import Inquiry
from kamera.window.places import Known
from kamera.window.policy import PositionRule
from kamera.window.report import Tally
from kamera.window.run import RowLied, Stage, run
from kamera.window.state import WindowState
from kamera.window.steps import Limits, Plan
from kamera.window.writing import standing


@dataclass(frozen=True)
class Bounds:
    """Maximum tokens of anchor and chunks together (None: no bound), and the position rule of slides."""

    max_tokens: int | None
    rule: PositionRule

    def limits(self, stage: Stage, state: WindowState, facts: Mapping[str, Facts]) -> Limits:
        """The limits of a plan for ``state``; ``facts`` of its chunks by id."""
        former = stage.former
        reach = former.backbone.limits
        return Limits(
            anchor=former.anchor.length,
            last=reach.last,
            max_tokens=self.max_tokens,
            rule=self.rule,
            lossy=former.context.lossy,
            check=lambda spot: reach.check(spot.top),
            places=Known(stage.standing, facts),
            standing=standing(stage.live, former.anchor.kv, state),
            phased=former.backbone.phased_bytes_per_token,
            joins=former.backbone.joins,
        )


class Decided(NamedTuple):
    """A plan that was run, the window after it, and the answer's tokens if a question was asked."""

    plan: Plan
    state: WindowState
    answer: torch.Tensor | None


def decided(
    decide: Callable[[Limits], Plan],
    before: WindowState,
    coming: Mapping[str, Facts],
    bounds: Bounds,
    stage: Stage,
    tally: Tally,
    ready: Callable[[Plan], Mapping[str, Facts]] = lambda _: {},
    inquiry: Inquiry | None = None,
) -> Decided:
    """Plan an operation and run it; a wrong row is refused, and the operation planned again.

    ``coming``: facts of chunks that are not in the window. ``ready`` gives the facts that had to wait for the
    plan: an unseen chunk is encoded only when the plan has shown that it can come.
    """
    facts = {**coming, **{r.facts.chunk_id: r.facts for r in before.residents}}
    while True:
        plan = decide(bounds.limits(stage, before, facts))
        facts |= ready(plan)
        try:
            return Decided(plan, *run(plan, before, facts, stage, tally, inquiry))
        except RowLied:
            continue
