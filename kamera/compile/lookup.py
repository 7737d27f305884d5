"""What is stored already: answered from ids alone, without a forward and without the vision tower."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kamera.backbones import Backbone
from kamera.errors import CorruptChunk, KameraError, WrongKey
from kamera.ops import PatchBudget
from kamera.ops.digest import tensor_digest
from kamera.store import ChunkStore, Context, PatchRecord
from kamera.window.anchor import anchor_ids
from kamera.window.orbit import how_many

logger = logging.getLogger(__name__)


def context_of(backbone: Backbone, store: ChunkStore, system: str | None) -> Context:
    """The context of a window under ``system``: its anchor is tokenised, not prefilled."""
    ids = anchor_ids(backbone, system)
    return Context(backbone.fingerprint, tensor_digest(ids), store.tenant, store.kv)


class Lookup:
    """Presence of what a job makes, under one context. Patches are read; canonicals are only looked for.

    ``refused`` counts the objects that are there and were not taken.
    """

    def __init__(self, store: ChunkStore, context: Context, samples: int | None) -> None:
        self.store = store
        self.context = context
        self.samples = samples
        self.refused = 0

    def has_canonical(self, chunk_id: str) -> bool:
        """Whether the chunk's canonical is stored."""
        return self.store.has(self.context, chunk_id)

    def has_patch(self, chunk_id: str, antecedents: Sequence[str], budget: PatchBudget) -> bool:
        """Whether a patch of at least the budget, formed behind exact antecedents, is stored.

        Raises WrongKey for one that is encrypted under a key that was not given.
        """
        record = self._patch(chunk_id, antecedents, "exact")
        return record is not None and record.formed == "exact" and _large_enough(record, budget)

    def has_orbit(self, chunk_id: str, antecedents: Sequence[str], budget: PatchBudget) -> bool:
        """Whether the set's orbit patch is stored, of at least the budget and over enough orderings.

        Raises WrongKey as `has_patch`.
        """
        record = self._patch(chunk_id, antecedents, "orbit")
        wanted = how_many(len(antecedents), self.samples)
        return (
            record is not None
            and int(record.info.get("orderings", 0)) >= wanted
            and _large_enough(record, budget)
        )

    def _patch(self, chunk_id: str, antecedents: Sequence[str], kind: str) -> PatchRecord | None:
        # what a patch was formed under stands in the record only: its row says nothing of the bytes
        try:
            return self.store.get_patch(self.context, chunk_id, antecedents, kind)
        except CorruptChunk as error:  # it is set aside now, and made again
            self.refuse(error)
            return None
        except WrongKey as error:  # its owner can read it: it stays
            self.refuse(error)
            raise

    def refuse(self, error: KameraError) -> None:
        """Count an object that was not taken, and say why."""
        self.refused += 1
        logger.warning("a stored object was refused: %s", error)


def _large_enough(record: PatchRecord, budget: PatchBudget) -> bool:
    filled = PatchBudget.from_info(record.info, record.patch.rank)
    # by its rank where it corrects nothing, and so does not know its tokens
    return budget.met_by(filled, record.tokens or budget.rank)
