"""What vLLM computed is read back from its pages, and becomes canonicals and patches in a store.

A worker copies pages out when a request's parts are all computed; a thread of its own makes records of them.
A chunk that stood right behind the anchor leaves its canonical. One that stood behind others leaves a patch
where its canonical is stored, and else its KV as it is, conditioned.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from kamera.engines.recipe import Recipe, RowKey, antecedent_name
from kamera.engines.vllm.counts import Counts
from kamera.engines.vllm.stores import Stores
from kamera.errors import KameraError
from kamera.ops import KV, Layout, PatchBudget, deficit, kv_bytes, uniform_offset
from kamera.store import CanonicalRecord, ChunkStore, Outline, PatchRecord, computed_base
from kamera.trust import at_least, guarantee_named, prefilled_behind

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HarvestChunk:
    """A chunk whose KV stands in the pages ``block_ids`` of a request: tokens ``ids`` from ``start`` on.

    ``row`` is the object that comes of it: an anchor, a canonical right behind that, or behind others an
    exact patch, or conditioned KV. ``positions`` ``[axes, tokens]`` and ``inputs`` as in `CanonicalRecord`.
    ``media`` are the engine's names of its pictures.
    """

    row: RowKey
    ids: tuple[int, ...]
    start: int
    positions: torch.Tensor
    block_ids: tuple[int, ...]
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    media: tuple[str, ...] = ()


def part_names(recipe: Recipe, supplied: int) -> tuple[str, ...]:
    """Each part as an antecedent of those behind it; all but the first ``supplied`` are computed."""
    names: tuple[str, ...] = ()
    for i, part in enumerate(recipe.parts):
        names = (*names, antecedent_name(part.chunk_id, part.antecedents if i < supplied else names, names))
    return names


class Harvester:
    """Makes records of KV in a thread of its own.

    ``limit`` bounds the bytes that are to be looked at.
    """

    def __init__(self, stores: Stores, layout: Layout, budget: PatchBudget, limit: int) -> None:
        self._stores, self._layout, self._budget, self._limit = stores, layout, budget, limit
        self._arrivals: queue.SimpleQueue[tuple[HarvestChunk, KV] | None] = queue.SimpleQueue()
        self._bytes = 0
        self._lock = threading.Lock()
        self.counts = Counts()
        self._thread = threading.Thread(target=self._work, name="kamera-harvest", daemon=True)
        self._thread.start()

    def take(self, ripe: HarvestChunk, kv: KV) -> None:
        """Make what can be made of KV that was read; returns at once. Over the bound it is dropped."""
        size = kv_bytes(kv)
        with self._lock:
            if self._bytes + size > self._limit:
                self.counts.add("dropped_bytes", "arriving", size)
                return
            self._bytes += size
        self._arrivals.put((ripe, kv))

    def close(self) -> None:
        """Make what has arrived, then end."""
        self._arrivals.put(None)
        self._thread.join(timeout=30)

    # -- its thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (item := self._arrivals.get()) is not None:
            ripe, kv = item
            try:
                self._make(ripe, kv)
            except (KameraError, ValueError, RuntimeError) as error:
                logger.warning("chunk %s was not harvested: %s", ripe.row.chunk_id[:12], error)
            with self._lock:
                self._bytes -= kv_bytes(kv)

    def _make(self, ripe: HarvestChunk, kv: KV) -> None:
        """Store what follows from a chunk's KV."""
        row, chunk = ripe.row, (ripe.row.context, ripe.row.chunk_id)
        store = self._stores.of(row.context.tenant)
        if row.kind == "exact":
            if not self._patch(store, ripe, kv):
                self._keep(store, ripe, kv)
        elif not store.has(*chunk, (), row.kind):
            self._put(store, _record(ripe, kv))

    def _keep(self, store: ChunkStore, ripe: HarvestChunk, kv: KV) -> None:
        """Store the KV of a chunk as it is, conditioned on what it was computed behind."""
        row, guarantee = ripe.row, prefilled_behind(guarantee_named(ripe.row.formed))
        if not at_least(guarantee, "patched"):
            return
        record = replace(
            _record(ripe, kv),
            kind="conditioned",
            context=replace(row.context, kv="as-is"),
            antecedents=row.antecedents,
            content=computed_base(guarantee),
        )
        if not store.has(record.context, row.chunk_id, row.antecedents, "conditioned", record.content):
            self._put(store, record)

    def _patch(self, store: ChunkStore, ripe: HarvestChunk, kv: KV) -> bool:
        """Store a chunk's patch. False without its canonical."""
        row, guarantee = ripe.row, guarantee_named(ripe.row.formed)
        canonical = store.get_canonical(row.context, row.chunk_id)
        if canonical is None:
            return False
        old_row = store.info(row.context, row.chunk_id, row.antecedents, "exact")
        offset = uniform_offset(canonical.positions, ripe.positions)
        if not at_least(guarantee, "survivor") or offset is None:
            return True
        if old_row and old_row.budget and self._budget.is_met_by(old_row.budget, canonical.tokens):
            return True
        deltas = deficit(kv, canonical.kv, self._layout, offset)
        (patch, energy), budget = self._budget.form(deltas, self._layout, canonical.kv)
        info = {"energy": energy, **budget.to_info()}
        self._put(
            store, PatchRecord(row.chunk_id, row.context, row.antecedents, "exact", patch, guarantee, info)
        )
        return True

    def _put(self, store: ChunkStore, record: CanonicalRecord | PatchRecord) -> None:
        store.put(record)
        base = record.content if isinstance(record, CanonicalRecord) else ""
        row = store.info(record.context, record.chunk_id, record.antecedents, record.kind, base)
        self.counts.add("harvested_bytes", record.kind, 0 if row is None else row.bytes)


def _record(ripe: HarvestChunk, kv: KV) -> CanonicalRecord:
    """The KV of a chunk, or of the anchor, as it was computed."""
    row, ids = ripe.row, torch.tensor(ripe.ids, dtype=torch.int64)
    # with every rotary layout that the connector takes, a text goes on behind the highest position
    advance = (int(ripe.positions.max()) + 1 - ripe.positions.amin(1)).tolist()
    return CanonicalRecord(
        row.chunk_id,
        row.context,
        ids,
        ripe.positions,
        kv,
        ripe.inputs,
        behind=ripe.start,  # tokens of the anchor
        kind=row.kind if row.kind == "anchor" else "canonical",
        outline=Outline.of(ids, ripe.positions, advance, ripe.media),
    )
