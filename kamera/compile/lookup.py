"""What is stored already: answered from ids alone, without a forward and without the vision tower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kamera.engines.hf import Backbone
from kamera.errors import CorruptChunk, KameraError, WrongKey
from kamera.ops import PatchBudget, tensor_digest
from kamera.patches import anchor_ids, how_many
from kamera.store import ChunkStore, Context, ObjectInfo

logger = logging.getLogger(__name__)


def context_of(backbone: Backbone, store: ChunkStore, system: str | None) -> Context:
    """The context of a window under ``system``: its anchor is tokenised, not prefilled."""
    ids = anchor_ids(backbone, system)
    return Context(backbone.fingerprint, tensor_digest(ids), store.tenant, store.kv)


class Lookup:
    """Presence of what a job makes, under one context. Rows decide; a patch that would do is verified.

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
        return self._is_there(chunk_id, antecedents, "exact", budget, lambda row: row.formed == "exact")

    def has_orbit(self, chunk_id: str, antecedents: Sequence[str], budget: PatchBudget) -> bool:
        """Whether the set's orbit patch is stored, of at least the budget and over enough orderings.

        Raises WrongKey as `has_patch`.
        """
        wanted = how_many(len(antecedents), self.samples)
        return self._is_there(
            chunk_id, antecedents, "orbit", budget, lambda row: (row.orderings or 0) >= wanted
        )

    def _is_there(
        self,
        chunk_id: str,
        antecedents: Sequence[str],
        kind: str,
        budget: PatchBudget,
        serves: Callable[[ObjectInfo], bool],
    ) -> bool:
        # the row says whether it would do; what would do is read once, as nobody may count on a damaged one
        try:
            row = self.store.info(self.context, chunk_id, antecedents, kind)
            if row is None or not serves(row) or not _large_enough(row, budget):
                return False
            return self.store.get_patch(self.context, chunk_id, antecedents, kind) is not None
        except CorruptChunk as error:  # it is set aside now, and made again
            self.refuse(error)
            return False
        except WrongKey as error:  # its owner can read it: it stays
            self.refuse(error)
            raise

    def refuse(self, error: KameraError) -> None:
        """Count an object that was not taken, and say why."""
        self.refused += 1
        logger.warning("a stored object was refused: %s", error)


def _large_enough(row: ObjectInfo, budget: PatchBudget) -> bool:
    # by its rank where it corrects nothing, and so does not know its tokens
    return row.budget is not None and budget.met_by(row.budget, row.tokens or budget.rank)
