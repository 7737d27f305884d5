"""Plans of operations and their cost, without running them."""

from __future__ import annotations

from collections.abc import Sequence

from kamera.content import Chunk, Content
from kamera.engines import Recipe
from kamera.errors import StalePlan
from kamera.patches import later_of
from kamera.window.bounds import Bounds
from kamera.window.naming import Named, Names
from kamera.window.opening import kept
from kamera.window.policy import Archive, OnLeave, PositionRule, ReusePolicy, policy_of
from kamera.window.questions import Questions
from kamera.window.recipe import recipe_of
from kamera.window.requests import (
    Append,
    Arrange,
    Condition,
    Evict,
    Insert,
    Recall,
    Reorder,
    Replace,
    Request,
    Slide,
)
from kamera.window.serial import serial
from kamera.window.slots import Slot
from kamera.window.steps import Plan

HELD = 8
"""Plans of the present state whose chunks a window holds for `KameraWindow.run`: the latest ones."""


class Planned(Questions):
    """A window that can plan its operations first.

    Planning runs no forward and no encode; it raises the refusals of the operation. A plan is run by
    `KameraWindow.run`.
    """

    _bounds: Bounds
    _plans: tuple[tuple[Plan, Named], ...] = ()

    @serial
    def plan(self, request: Request, *, policy: ReusePolicy | None = None) -> Plan:
        """The plan of a request (`kamera.window.requests`).

        ``policy`` takes the place of the window's and asks no certificate, for callers that judge the trust
        of single chunks themselves (`kamera.reuse`).
        """
        with self.backbone.steady():
            self._stage.former.check_fingerprint()  # a plan serves nothing, so it is no occasion for a probe
            self._go_apart()
            with self._stage.former.operation():
                named = self._names().of(request)
                served = self.policy if policy is None else policy_of(policy)
                plan = self._bounds.plan(named, self._stage, self._state, served)
        self._plans = (*self._plans[-HELD + 1 :], (plan, named))
        return plan

    def plan_append(self, content: Content | Chunk, *, archive: Archive | None = None) -> Plan:
        """Plan of `append`."""
        return self.plan(Append(content, archive))

    def plan_recall(self, chunk: str | Slot | Chunk, *, move: bool = False) -> Plan:
        """Plan of `recall`; the archived chunk is read, since its tokens determine its positions."""
        return self.plan(Recall(chunk, move))

    def plan_slide(self, n: int = 1, *, positions: PositionRule = "compact") -> Plan:
        """Plan of `slide`."""
        return self.plan(Slide(n, positions))

    def plan_evict(self, slot: Slot | int, *, positions: PositionRule = "compact") -> Plan:
        """Plan of `evict`."""
        return self.plan(Evict(slot, positions))

    def plan_reorder(self, permutation: Sequence[int]) -> Plan:
        """Plan of `reorder`."""
        return self.plan(Reorder(permutation))

    def plan_insert(self, index: int, content: Content | Chunk, *, on_leave: OnLeave = "repair") -> Plan:
        """Plan of `insert`."""
        return self.plan(Insert(index, content, on_leave))

    def plan_replace(
        self, slot: Slot | int, content: Content | Chunk, *, on_leave: OnLeave = "repair"
    ) -> Plan:
        """Plan of `replace`."""
        return self.plan(Replace(slot, content, on_leave))

    def plan_arrange(
        self,
        order: Sequence[Slot | Content | Chunk],
        *,
        on_leave: OnLeave = "repair",
        among: Sequence[Chunk] = (),
    ) -> Plan:
        """Plan of `arrange`."""
        return self.plan(Arrange(order, on_leave, among))

    def plan_condition(self, slot: Slot | int, on: bool) -> Plan:
        """Plan of `condition`."""
        return self.plan(Condition(slot, on))

    @serial
    def recipe(self) -> Recipe:
        """What another engine needs to show this window: token ids, borders, places, rows, guarantees.

        It is made of rows: no tensor is read, and nothing stored. `Recipe.missing` names the slots whose KV
        is in this window's memory alone, until `keep` stores it.
        """
        self._check_backbone()
        return recipe_of(self._stage.former, self._state)

    @serial
    def keep(self) -> Recipe:
        """Store the KV that every slot shows; returns the recipe of the window, which misses nothing then.

        Canonicals and the anchor are stored as always, and KV that was run in this window (prefilled or
        sampled behind antecedents, survivors included) by its content. No forward runs. Raises StoreError.
        """
        self._check_backbone()
        later_of(self.backbone).flush()
        self._state, self._plans = kept(self._stage.former, self._state), ()
        return recipe_of(self._stage.former, self._state)

    # -- inside --------------------------------------------------------------------------------

    def _names(self) -> Names:
        return Names(self._stage.former, self._state)

    def _own(self, plan: Plan, chunks: Sequence[Chunk]) -> tuple[Plan, Named]:
        """A plan and its request. Raises StalePlan unless it is what this window would plan now.

        One that this window made in its present state is taken as it is; any other is made again under the
        window's own policy, and compared.
        """
        now = self._state.seats
        for made, named in self._plans:
            if made is plan and plan.before is now:
                return made, named
        what = f"the plan of {plan.operation} was made for another state of a window"
        if len(plan.before.seats) != len(now.seats):
            raise StalePlan(
                f"{what}, of {len(plan.before.seats)} chunks; this one has {len(now.seats)}: plan anew"
            )
        if plan.policy != self.policy:
            raise StalePlan(f"the plan of {plan.operation} was made under another policy: plan anew")
        named = self._names().again(plan.request, chunks)
        again = self._bounds.plan(named, self._stage, self._state, self.policy)
        if again.outline() != plan.outline():
            raise StalePlan(f"{what}, or of its store: plan anew")
        return again, named
