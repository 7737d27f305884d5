"""What is stored already: answered from ids alone, without a forward and without the vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from math import factorial

from kamera.backbones import Backbone
from kamera.ops.digest import tensor_digest
from kamera.store import ChunkStore, Context
from kamera.window.anchor import anchor_ids
from kamera.window.orbit import EXHAUSTIVE


def context_of(backbone: Backbone, store: ChunkStore, system: str | None) -> Context:
    """The context of a window under ``system``: its anchor is tokenised, not prefilled."""
    ids = anchor_ids(backbone, system)
    return Context(backbone.fingerprint, tensor_digest(ids), store.tenant)


class Lookup:
    """Presence of what a job makes, under one context. A file is not read where its row will do."""

    def __init__(self, store: ChunkStore, context: Context, rank: int, samples: int) -> None:
        self.store = store
        self.context = context
        self.rank = rank
        self.samples = samples

    def has_canonical(self, chunk_id: str) -> bool:
        """Whether the chunk's canonical is stored."""
        return self.store.has_canonical(self.context, chunk_id)

    def has_patch(self, chunk_id: str, antecedents: Sequence[str]) -> bool:
        """Whether a patch of at least the rank, formed behind exact antecedents, is stored."""
        info = self.store.patch_info(self.context, chunk_id, antecedents)
        if info is None or info.formed != "exact":
            return False
        if (info.rank or 0) >= min(self.rank, info.tokens):
            return True
        # a deficit of low rank gives a patch of low rank, whatever was asked for
        return self._asked(chunk_id, antecedents, "exact", "asked_rank") >= self.rank

    def has_orbit(self, chunk_id: str, antecedents: Sequence[str]) -> bool:
        """Whether the set's orbit patch is stored, of at least the rank and over enough orderings."""
        if not self.store.has_patch(self.context, chunk_id, antecedents, "orbit"):
            return False
        count = len(antecedents)
        wanted = factorial(count) if count <= EXHAUSTIVE else min(self.samples, factorial(count))
        return (
            self._asked(chunk_id, antecedents, "orbit", "asked_rank") >= self.rank
            and self._asked(chunk_id, antecedents, "orbit", "orderings") >= wanted
        )

    def _asked(self, chunk_id: str, antecedents: Sequence[str], kind: str, name: str) -> int:
        record = self.store.get_patch(self.context, chunk_id, antecedents, kind)
        return 0 if record is None else int(record.info.get(name, 0))
