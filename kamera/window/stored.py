"""What the store has for one window. Whatever of it cannot be used is a miss, and said so."""

from __future__ import annotations

import logging

from kamera.errors import CorruptChunk, WrongKey
from kamera.ops import PatchBudget
from kamera.store import CanonicalRecord, ChunkStore, Context, ObjectInfo, PatchRecord
from kamera.store.keys import behind_survivors
from kamera.window.forming import Forming
from kamera.window.losses import Losses
from kamera.window.report import Tally
from kamera.window.slots import Facts

logger = logging.getLogger(__name__)


class Stored:
    """Look-ups and puts under one context; a patch that is still being formed is waited for.

    What the store cannot do goes to ``losses``.
    """

    def __init__(
        self, store: ChunkStore, context: Context, budget: PatchBudget, forming: Forming, losses: Losses
    ) -> None:
        self.losses = losses
        self._store = store
        self._context = context
        self._budget = budget
        self._forming = forming

    def canonical(self, chunk_id: str) -> CanonicalRecord | None:
        """A chunk's canonical, or None."""
        with self.losses.borne(f"chunk {chunk_id[:12]} was not looked up"):
            try:
                record = self._store.get_canonical(self._context, chunk_id)
                if record is not None:
                    self.losses.unkept.discard(chunk_id)
                return record
            except (CorruptChunk, WrongKey) as error:
                # the chunk is at hand, so it is prefilled and archived again
                logger.warning("a stored canonical was refused: %s", error)
        return None

    def has_canonical(self, chunk_id: str) -> bool:
        """Whether a chunk's canonical is stored, as far as can be told without reading it."""
        with self.losses.borne(f"chunk {chunk_id[:12]} was not looked up"):
            return self._store.has(self._context, chunk_id)
        return False

    def keep(self, record: CanonicalRecord) -> None:
        """Store a canonical; what is refused is offered again later."""
        chunk_id = record.chunk_id
        self.losses.unkept.add(chunk_id)
        with self.losses.borne(f"chunk {chunk_id[:12]} was not kept"):
            self._store.put_canonical(record)
            self.losses.unkept.discard(chunk_id)

    def patch(
        self, facts: Facts, antecedents: tuple[str, ...], kind: str, tally: Tally
    ) -> PatchRecord | None:
        """A patch that is as large as the policy wants, or None; notes say what was refused."""
        self._forming.settle(facts.chunk_id)
        record = None
        with self.losses.borne(f"a patch of chunk {facts.chunk_id[:12]} was not looked up"):
            try:
                record = self._store.get_patch(self._context, facts.chunk_id, antecedents, kind)
            except (CorruptChunk, WrongKey) as error:
                logger.warning("a stored patch was refused: %s", error)
                tally.notes.append(f"patch refused: {error}")
        if record is None:
            return None
        filled = PatchBudget.from_info(record.info, record.patch.rank)
        # held shorter than the policy wants, unless that was all the chunk has
        return record if self._budget.met_by(filled, facts.length) else None

    def patches_of(self, facts: Facts) -> list[ObjectInfo]:
        """All patches of a chunk, whatever their antecedents; none that was formed behind survivors."""
        self._forming.settle(facts.chunk_id)
        return [
            info
            for info in self._store.ls(chunk_id=facts.chunk_id)
            if info.kind != "canonical"
            and info.context == self._context
            and not behind_survivors(info.antecedents)
        ]
