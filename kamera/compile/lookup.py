"""Look-up of stored objects by ids alone, without a forward and without the vision tower."""

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
    """The context of a window under ``system``; its anchor is tokenised, not prefilled."""
    ids = anchor_ids(backbone, system)
    return Context(backbone.fingerprint, tensor_digest(ids), store.tenant, store.kv)


class Lookup:
    """Presence of objects in one context. Rows decide; a suitable patch is also verified.

    ``proving``: patches have to prove themselves. ``refused`` counts stored objects that were not accepted.
    """

    def __init__(
        self, store: ChunkStore, context: Context, samples: int | None, proving: bool = False
    ) -> None:
        self.store = store
        self.context = context
        self.samples = samples
        self._proving = proving
        self.refused = 0

    def has_canonical(self, chunk_id: str) -> bool:
        """True if the chunk's canonical is stored."""
        return self.store.has(self.context, chunk_id)

    def has_patch(self, chunk_id: str, antecedents: Sequence[str], budget: PatchBudget) -> bool:
        """True if a patch of at least the budget, formed behind exact antecedents, is stored.

        Where patches prove themselves, one that was asked too little does not count. Raises WrongKey for one
        encrypted under a missing key.
        """

        def serves(row: ObjectInfo) -> bool:
            asked = row.proof is not None and not row.proof.undecided
            return row.formed == "exact" and (asked or not self._proving)

        return self._is_there(chunk_id, antecedents, "exact", budget, serves)

    def has_orbit(self, chunk_id: str, antecedents: Sequence[str], budget: PatchBudget) -> bool:
        """True if the set's orbit patch is stored, of at least the budget and over enough orderings.

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
        # the row decides if it is suitable; a suitable one is read once, because it may be damaged
        try:
            row = self.store.info(self.context, chunk_id, antecedents, kind)
            if row is None or not serves(row) or not _large_enough(row, budget):
                return False
            return self.store.get_patch(self.context, chunk_id, antecedents, kind) is not None
        except CorruptChunk as error:  # quarantined by the read, and formed again
            self.refuse(error)
            return False
        except WrongKey as error:  # readable by its owner, so it is not replaced
            self.refuse(error)
            raise

    def refuse(self, error: KameraError) -> None:
        """Count and log an object that was not accepted."""
        self.refused += 1
        logger.warning("a stored object was refused: %s", error)


def _large_enough(row: ObjectInfo, budget: PatchBudget) -> bool:
    # an empty patch has no number of tokens: its rank stands in
    return row.budget is not None and budget.met_by(row.budget, row.tokens or budget.rank)
