"""The bounds of a window, and the loop that plans an operation and runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kamera.patches import Facts
from kamera.window.inquiry import Inquiry
from kamera.window.keeping import RowLied
from kamera.window.leaving import is_glue
from kamera.window.naming import Named
from kamera.window.places import Known
from kamera.window.plan import plan as planned
from kamera.window.policy import PositionRule, ReusePolicy
from kamera.window.report import Tally
from kamera.window.requests import Arrange
from kamera.window.run import run
from kamera.window.sampling import Sampler
from kamera.window.stage import Stage
from kamera.window.state import WindowState
from kamera.window.steps import Limits, Plan, View
from kamera.window.writing import standing


@dataclass(frozen=True)
class Bounds:
    """Maximum tokens of anchor and chunks together (None: no bound), and the position rule of slides."""

    max_tokens: int | None
    rule: PositionRule

    def limits(
        self,
        stage: Stage,
        state: WindowState,
        facts: Mapping[str, Facts],
        policy: ReusePolicy,
        glue: Callable[[str], bool],
    ) -> Limits:
        """The limits of a plan for ``state``; ``facts`` of its chunks by id, ``glue`` as in `Limits`."""
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
            glue=glue,
            form=lambda chunk_id: former.form_of(facts[chunk_id]),
            samples=Sampler(former, state, policy, facts, glue) if policy.samples else None,
        )

    def plan(self, named: Named, stage: Stage, state: WindowState, policy: ReusePolicy) -> Plan:
        """The plan of a request to a window in ``state``."""
        request, facts = named.request, facts_of(named, state)
        told = isinstance(request, Arrange) and not request.archive and policy.forms == "returning"
        limits = self.limits(stage, state, facts, policy, lambda chunk_id: told and is_glue(facts[chunk_id]))
        return planned(request, View(state.seats, stage.former.catalogue, policy, limits))


def facts_of(named: Named, state: WindowState) -> dict[str, Facts]:
    """The facts of all chunks that a plan of the request may seat, by id."""
    return {**named.coming, **{r.facts.chunk_id: r.facts for r in state.residents}}


class Done(NamedTuple):
    """A plan that was run, the window after it, and the answer's tokens if a question was asked."""

    plan: Plan
    state: WindowState
    answer: torch.Tensor | None


def carried_out(
    named: Named,
    before: WindowState,
    bounds: Bounds,
    stage: Stage,
    policy: ReusePolicy,
    tally: Tally,
    plan: Plan | None = None,
    inquiry: Inquiry | None = None,
) -> Done:
    """Run a request by its ``plan``, which is made here if none is given.

    An unseen chunk is encoded only when the plan has shown that it can come. If an object is missing or
    differs from its row, the row is refused and the request planned again.
    """
    plan = plan or bounds.plan(named, stage, before, policy)
    tally.passed("plan")
    facts = {**facts_of(named, before), **named.encoded(stage.former)}
    tally.passed("encode")
    while True:
        try:
            ran = run(plan, before, facts, stage, tally, inquiry)
            tally.passed("run")
            return Done(plan, *ran)
        except RowLied:
            plan = bounds.plan(named, stage, before, policy)
