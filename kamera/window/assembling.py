"""Assembly of a window out of a set of chunks, and the cascade behind one of them (appendix E)."""

from __future__ import annotations

from collections.abc import Sequence

from kamera.content import Chunk, Content
from kamera.window.anticipating import Anticipating
from kamera.window.cascade import Cascade, cascade
from kamera.window.report import Report
from kamera.window.requests import Assemble, Placing
from kamera.window.serial import serial
from kamera.window.slots import Slot
from kamera.window.steps import Plan


class Assembling(Anticipating):
    """A window whose chunks are a set: which of them stand, and where, is a decision."""

    @serial
    def assemble(
        self,
        chunks: Sequence[str | Slot | Content | Chunk],
        max_tokens: int | None = None,
        order: Placing = "free",
    ) -> Report:
        """Make the window hold these chunks, in the order in which the least is run.

        ``chunks`` are ids of stored chunks or the beginnings of them (a string is never text here), slots,
        chunks, or contents; one that stands in the window keeps the KV it has there where it can. Slots that
        are not named leave, as in `arrange`, whose costs and refusals these are under "repair".

        ``max_tokens`` bounds anchor and chunks together, beside the window's own bound. Of more chunks than
        fit, those given first stand: each, in turn, if it still fits; the notes name the others. WindowFull
        if none fits.

        ``order`` "free": the fewest tokens are run, then the fewest forwards; of equal orders the one nearest
        to that given. It is decided from rows: exactly for eight chunks, by a search for more, which is never
        dearer than the order given. "given" keeps that order. Later work is not counted.
        """
        return self._answered(Assemble(chunks, max_tokens, order))[0]

    def plan_assemble(
        self,
        chunks: Sequence[str | Slot | Content | Chunk],
        max_tokens: int | None = None,
        order: Placing = "free",
    ) -> Plan:
        """Plan of `assemble`: the order is that of ``plan.after``."""
        return self.plan(Assemble(chunks, max_tokens, order))

    @serial
    def dependents(self, slot: Slot | int) -> Cascade:
        """The slots whose KV was conditioned on a chunk, and what a repair runs if it leaves or changes.

        Runs nothing. The repair is that of ``on_leave="repair"`` (under a minimum of "exact", of "exact"),
        whatever this window does with survivors. UnknownSlot for a slot that is not in the window.
        """
        with self.backbone.steady():
            self._stage.former.check_fingerprint()
            self._go_apart()
            with self._stage.former.operation():
                index = self._state.index(slot)
                return cascade(self._bounds, self._stage, self._state, self.policy, self.slots, index)
