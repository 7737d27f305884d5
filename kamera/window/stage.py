"""The parts of a window that make its plans and act on them, within its bounds."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from kamera.engines import Engine, LiveKV, Span
from kamera.patches import Anchor, Before, Facts, Former, Losses, form_of, later_of
from kamera.store import ChunkStore
from kamera.trust import ReusePolicy
from kamera.window.naming import NamedRequest
from kamera.window.plan import plan as planned
from kamera.window.report import Tally
from kamera.window.requests import Arrange
from kamera.window.seats import Seat, Spot, is_glue
from kamera.window.spots import Spots
from kamera.window.state import WindowState
from kamera.window.steps import Limits, Plan, View


@dataclass(frozen=True)
class Stage:
    """The former, the live cache and the positions of chunks; ``max_tokens`` bounds anchor and chunks."""

    former: Former
    live: LiveKV
    spots: Spots
    max_tokens: int | None = None

    def show(self, state: WindowState, tally: Tally) -> None:
        """Make the live cache show ``state``."""
        tally.add(self.live.show(self.spans(state)))

    def spans(self, state: WindowState) -> list[Span]:
        """The spans of the anchor and of the chunks of ``state``."""
        return [Span(self.former.anchor.kv, None, state.seats.frame), *state.spans]

    def before(self, state: WindowState, seat: Seat) -> Before:
        """What the chunk of a seat, which comes next, was prefilled behind."""
        return Before(seat.source.antecedents, seat.formed, tuple(self.spans(state)))

    def plan(self, named: NamedRequest, state: WindowState, policy: ReusePolicy) -> Plan:
        """The plan of a request to a window in ``state``. Raises the refusals of the operation."""
        request, facts = named.request, named.facts(state)
        glue = frozenset[str]()
        if isinstance(request, Arrange) and not request.archive and policy.forms == "returning":
            glue = frozenset(chunk_id for chunk_id, chunk in facts.items() if is_glue(chunk))
        limits = self.limits(state, facts, policy, glue)
        return planned(request, View(state.seats, self.former.catalogue, policy, limits))

    def limits(
        self,
        state: WindowState,
        facts: Mapping[str, Facts],
        policy: ReusePolicy,
        glue: frozenset[str] = frozenset(),
    ) -> Limits:
        """The limits of a plan for ``state``; ``facts`` of its chunks by id, ``glue`` as in `Limits`."""
        former = self.former
        return Limits(
            anchor=former.anchor.length,
            reach=former.backbone.limits,
            max_tokens=self.max_tokens,
            lossy=former.context.lossy,
            places=_Places(self, facts),
            joins=former.backbone.facts.joins,
            glue=glue,
            pending=frozenset(name for context, name in tuple(former.waiting) if context == former.context),
        )


def stage_of(
    backbone: Engine,
    store: ChunkStore,
    anchor: Anchor,
    policy: ReusePolicy,
    losses: Losses,
    max_tokens: int | None,
) -> Stage:
    """The parts that act for a window under ``policy``."""
    former = Former(backbone, store, anchor, policy.budget, later_of(backbone), losses, policy.max_error)
    return Stage(former, backbone.live(holds=True), Spots(backbone, anchor), max_tokens)


@dataclass(frozen=True, eq=False)
class Departure:
    """A window ``before`` it and after its ``count`` oldest chunks have left, on a live cache of its own.

    ``plan`` is that of the departure, whose steps have run.
    """

    before: WindowState
    count: int
    plan: Plan
    state: WindowState
    stage: Stage


@dataclass(frozen=True)
class _Places:
    """The `Places` of a plan: of chunks by their ids."""

    stage: Stage
    facts: Mapping[str, Facts]

    def compact(self, chunk_ids: Sequence[str]) -> list[Spot]:
        return self.stage.spots.compact([self.facts[i] for i in chunk_ids])

    def form(self, chunk_id: str) -> Hashable | None:
        return form_of(self.stage.former.backbone, self.facts[chunk_id])
