"""Plans of operations and their cost, without running them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kamera.content import Chunk, Content
from kamera.window.asked import Asked, Asking
from kamera.window.policy import Archive, OnLeave, PositionRule
from kamera.window.questions import Questions
from kamera.window.report import Tally
from kamera.window.serial import serial
from kamera.window.slots import Slot
from kamera.window.steps import Plan


class Planned(Questions):
    """A window that can plan its operations first.

    Planning runs no forward and no encode; it raises the refusals of the operation.
    """

    @serial
    def plan_append(self, content: Content | Chunk, *, archive: Archive | None = None) -> Plan:
        """Plan of `append`."""
        return self._plan(lambda asking: asking.append(content, archive))

    @serial
    def plan_recall(self, chunk: str | Slot | Chunk, *, move: bool = False) -> Plan:
        """Plan of `recall`; the archived chunk is read, since its tokens determine its positions."""
        return self._plan(lambda asking: asking.recall(chunk, Tally(), move=move))

    @serial
    def plan_slide(self, n: int = 1, *, positions: PositionRule = "compact") -> Plan:
        """Plan of `slide`."""
        return self._plan(lambda asking: asking.slide(n, positions))

    @serial
    def plan_evict(self, slot: Slot | int, *, positions: PositionRule = "compact") -> Plan:
        """Plan of `evict`."""
        return self._plan(lambda asking: asking.evict(slot, positions))

    @serial
    def plan_reorder(self, permutation: Sequence[int]) -> Plan:
        """Plan of `reorder`."""
        return self._plan(lambda asking: asking.reorder(permutation))

    @serial
    def plan_insert(self, index: int, content: Content | Chunk, *, on_leave: OnLeave = "repair") -> Plan:
        """Plan of `insert`."""
        return self._plan(lambda asking: asking.insert(index, content, on_leave))

    @serial
    def plan_replace(
        self, slot: Slot | int, content: Content | Chunk, *, on_leave: OnLeave = "repair"
    ) -> Plan:
        """Plan of `replace`."""
        return self._plan(lambda asking: asking.replace(slot, content, on_leave))

    @serial
    def plan_arrange(
        self,
        order: Sequence[Slot | Content | Chunk],
        *,
        on_leave: OnLeave = "repair",
        among: Sequence[Chunk] = (),
    ) -> Plan:
        """Plan of `arrange`."""
        return self._plan(lambda asking: asking.arrange(order, on_leave, among))

    @serial
    def plan_condition(self, slot: Slot | int, on: bool) -> Plan:
        """Plan of `condition`."""
        return self._plan(lambda asking: asking.condition(slot, on))

    # -- inside --------------------------------------------------------------------------------

    def _asking(self) -> Asking:
        return Asking(self._stage, self._state, self.policy)

    def _plan(self, ask: Callable[[Asking], Asked]) -> Plan:
        self._check_backbone()
        with self._stage.former.operation():
            asked = ask(self._asking())
            facts = {**asked.coming, **{r.facts.chunk_id: r.facts for r in self._state.residents}}
            return asked.decide(self._bounds.limits(self._stage, self._state, facts))
