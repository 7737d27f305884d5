"""What the store has for one window. Whatever of it cannot be used is a miss, and said so."""

from __future__ import annotations

import logging

from kamera.errors import CorruptChunk, WrongKey
from kamera.ops import PatchBudget
from kamera.store import CanonicalRecord, ChunkStore, Context, ObjectInfo, PatchRecord
from kamera.window.forming import Forming
from kamera.window.report import Tally
from kamera.window.slots import Facts

logger = logging.getLogger(__name__)


class Stored:
    """Look-ups under one context; a patch that is still being formed is waited for."""

    def __init__(self, store: ChunkStore, context: Context, budget: PatchBudget, forming: Forming) -> None:
        self._store = store
        self._context = context
        self._budget = budget
        self._forming = forming

    def canonical(self, chunk_id: str) -> CanonicalRecord | None:
        """A chunk's canonical, or None."""
        try:
            return self._store.get_canonical(self._context, chunk_id)
        except (CorruptChunk, WrongKey) as error:
            # the chunk is at hand, so it is prefilled and archived again
            logger.warning("a stored canonical was refused: %s", error)
            return None

    def patch(
        self, facts: Facts, antecedents: tuple[str, ...], kind: str, tally: Tally
    ) -> PatchRecord | None:
        """A patch that is as large as the policy wants, or None; notes say what was refused."""
        self._forming.settle(facts.chunk_id)
        try:
            record = self._store.get_patch(self._context, facts.chunk_id, antecedents, kind)
        except (CorruptChunk, WrongKey) as error:
            logger.warning("a stored patch was refused: %s", error)
            tally.notes.append(f"patch refused: {error}")
            return None
        if record is None:
            return None
        filled = PatchBudget.from_info(record.info, record.patch.rank)
        # held shorter than the policy wants, unless that was all the chunk has
        return record if self._budget.met_by(filled, facts.length) else None

    def patches_of(self, facts: Facts) -> list[ObjectInfo]:
        """All patches of a chunk, whatever their antecedents."""
        self._forming.settle(facts.chunk_id)
        return [
            info
            for info in self._store.ls(chunk_id=facts.chunk_id)
            if info.kind != "canonical" and info.context == self._context
        ]
