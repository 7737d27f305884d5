"""Composed patches in the store of an engine: the terms that it forms, and what is made of them.

The product serves none (docs/composed.md). A chunk that arrives behind n others is prefilled behind each of
them alone and behind each ordered pair, n + n(n - 1) / 2 prompts; of these terms `lab.composed` makes its
patch behind any of them in that order.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch

from kamera.ops import Layout, PatchBudget, kv_of
from kamera.store import CanonicalRecord, ChunkStore, Context, PatchRecord
from kamera.window import EngineWindow
from lab.composed.compose import compose, terms_of


def form_terms(window: EngineWindow, before: Sequence[str], chunk_id: str) -> None:
    """Have the engine form the patches of a chunk behind each of these, and behind each ordered pair.

    ``window`` is empty, has seen all of them, and is left empty.
    """
    for term in [*((one,) for one in before), *itertools.combinations(before, 2)]:
        for name in (*term, chunk_id):
            window.recall(name)
        window.anticipate(leaving=0)
        window.slide(len(window.slots))


def await_patch(store: ChunkStore, context: Context, chunk_id: str, behind: tuple[str, ...]) -> None:
    """Wait until the engine has stored a patch. Raises AssertionError if it does not."""
    for _ in range(600):
        if store.info(context, chunk_id, behind, "exact") is not None:
            return
        time.sleep(0.02)
    raise AssertionError(f"no patch of {chunk_id[:12]} behind {len(behind)} chunks was formed")


def put_composed(
    store: ChunkStore, context: Context, chunk_ids: Sequence[str], layout: Layout, budget: PatchBudget
) -> None:
    """Store a composed patch for each chunk of a window that has three antecedents or more."""
    for at in range(3, len(chunk_ids)):
        chunk_id, order = chunk_ids[at], tuple(chunk_ids[:at])
        if store.info(context, chunk_id, order, "exact") is not None:
            continue
        terms = {}
        for term in terms_of(order):
            await_patch(store, context, chunk_id, term)
            record = store.get_patch(context, chunk_id, term, "exact")
            assert record is not None
            terms[term] = record.patch
        canonical = store.get_canonical(context, chunk_id)
        assert canonical is not None
        said = compose(terms, order).deltas
        deltas = kv_of([{**zeros, **layer} for zeros, layer in zip(_zeros(canonical), said, strict=True)])
        (patch, energy), filled = budget.form(deltas, layout, canonical.kv)
        info = {"energy": energy, "composed": True, **filled.to_info()}
        store.put(PatchRecord(chunk_id, context, order, "exact", patch, "patched", info))


def _zeros(canonical: CanonicalRecord) -> list[dict[str, torch.Tensor]]:
    """Deficits of nothing: by layer, channel -> ``[tokens, features]``."""
    return [
        {name: torch.zeros(t.shape[1], t.shape[0] * t.shape[2]) for name, t in layer.items()}
        for layer in canonical.kv
    ]
