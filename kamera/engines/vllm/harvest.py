"""What vLLM computed is read back from its pages, and becomes canonicals and patches in a store.

A worker copies pages out when a request's parts are all computed; a thread of its own makes records of them.
A chunk that stood right behind the anchor leaves its canonical. One that stood behind others leaves a patch,
once its canonical is there: until then its KV waits, and what waits is bounded.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kamera.engines.recipe import Recipe, RowKey
from kamera.engines.vllm.counts import Counts
from kamera.engines.vllm.stores import Stores
from kamera.errors import KameraError
from kamera.ops import KV, Layout, PatchBudget, deficit, digest, kv_bytes, uniform_offset
from kamera.store import CanonicalRecord, ChunkStore, Context, Outline, PatchRecord, survivor_id
from kamera.trust import at_least, guarantee_named

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HarvestChunk:
    """A chunk whose KV stands in the pages ``block_ids`` of a request: tokens ``ids`` from ``start`` on.

    ``row`` is the object that comes of it: an anchor, a canonical right behind that, or behind others an
    exact patch. ``positions`` ``[axes, tokens]`` and ``inputs`` as in `CanonicalRecord`. ``media`` are the
    engine's names of its pictures.
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


def antecedent_name(chunk_id: str, antecedents: tuple[str, ...], names: tuple[str, ...]) -> str:
    """A chunk conditioned on ``antecedents``, as an antecedent of what follows; ``names`` stand before it."""
    if antecedents == names:
        return chunk_id
    return survivor_id(chunk_id, digest("kamera.lineage.v1", *antecedents)[:32])


class Harvester:
    """Makes records of KV in a thread of its own.

    ``limit`` bounds the bytes that are to be looked at, and those that wait for a canonical: of these the
    oldest are dropped.
    """

    def __init__(self, stores: Stores, layout: Layout, budget: PatchBudget, limit: int) -> None:
        self._stores, self._layout, self._budget, self._limit = stores, layout, budget, limit
        self._arrivals: queue.SimpleQueue[tuple[HarvestChunk, KV] | None] = queue.SimpleQueue()
        self._queue: OrderedDict[tuple[Context, str], tuple[HarvestChunk, KV]] = OrderedDict()
        self._bytes = self._queue_bytes = 0
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
        """Store what follows from a chunk's KV, or keep it until its canonical comes."""
        row, chunk = ripe.row, (ripe.row.context, ripe.row.chunk_id)
        store = self._stores.of(row.context.tenant)
        if row.kind != "exact":
            if not store.has(*chunk, (), row.kind):
                self._put(store, _canonical(ripe, kv))
            for pair in self._leave(chunk):
                self._patch(store, *pair)
        elif not self._patch(store, ripe, kv):
            self._leave(chunk)
            self._queue[chunk] = ripe, kv
            self._queue_bytes += kv_bytes(kv)
            while self._queue_bytes > self._limit:
                for _, oldest in self._leave(next(iter(self._queue))):
                    self.counts.add("dropped_bytes", "waiting", kv_bytes(oldest))

    def _leave(self, chunk: tuple[Context, str]) -> list[tuple[HarvestChunk, KV]]:
        """The KV of a chunk that waits no longer; empty for none."""
        pairs = [self._queue.pop(chunk)] if chunk in self._queue else []
        self._queue_bytes -= sum(kv_bytes(kv) for _, kv in pairs)
        return pairs

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
        row = store.info(record.context, record.chunk_id, record.antecedents, record.kind)
        self.counts.add("harvested_bytes", record.kind, 0 if row is None else row.bytes)


def _canonical(ripe: HarvestChunk, kv: KV) -> CanonicalRecord:
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
        kind=row.kind,
        outline=Outline.of(ids, ripe.positions, advance, ripe.media),
    )
