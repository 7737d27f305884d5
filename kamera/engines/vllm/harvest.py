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
from kamera.store import CanonicalRecord, ChunkStore, Context, Outline, PatchRecord, survivor
from kamera.trust import Guarantee, at_least

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ripe:
    """A chunk whose KV stands in pages: tokens ``start`` up to ``stop`` of a request.

    ``antecedents`` as in `kamera.engines.Part`, ``formed`` is the weakest guarantee among them.
    ``positions`` ``[axes, tokens]`` and ``inputs`` as in `CanonicalRecord`. The ``kind`` is "anchor",
    "canonical" or, behind antecedents, "exact". ``media`` are the engine's names of its pictures.
    """

    kind: str
    chunk_id: str
    start: int
    stop: int
    antecedents: tuple[str, ...]
    formed: Guarantee
    positions: torch.Tensor
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    media: tuple[str, ...] = ()


@dataclass(frozen=True)
class PageHarvest:
    """What of a request's pages is to be read back."""

    recipe: Recipe
    block_ids: tuple[int, ...]
    chunks: tuple[Ripe, ...]


def names_of(recipe: Recipe, supplied: int) -> tuple[str, ...]:
    """Each part as an antecedent of those behind it; all but the first ``supplied`` are computed."""
    names: tuple[str, ...] = ()
    for i, part in enumerate(recipe.parts):
        names = (*names, name_behind(part.chunk_id, part.antecedents if i < supplied else names, names))
    return names


def name_behind(chunk_id: str, antecedents: tuple[str, ...], names: tuple[str, ...]) -> str:
    """A chunk conditioned on ``antecedents``, as an antecedent of what follows; ``names`` stand before it."""
    if antecedents == names:
        return chunk_id
    return survivor(chunk_id, digest("kamera.lineage.v1", *antecedents)[:32])


@dataclass
class Waiting:
    """A chunk's KV, read from pages."""

    ripe: Ripe
    recipe: Recipe
    kv: KV


class Harvester:
    """Makes records of KV in a thread of its own.

    ``limit`` bounds the bytes that are to be looked at, and those that wait for a canonical: of these the
    oldest are dropped.
    """

    def __init__(self, stores: Stores, layout: Layout, budget: PatchBudget, limit: int) -> None:
        self._stores, self._layout, self._budget, self._limit = stores, layout, budget, limit
        self._arrived: queue.SimpleQueue[Waiting | None] = queue.SimpleQueue()
        self._waiting: OrderedDict[tuple[Context, str], Waiting] = OrderedDict()
        self._bytes = self._kept = 0
        self._lock = threading.Lock()
        self.counts = Counts()
        self._thread = threading.Thread(target=self._work, name="kamera-harvest", daemon=True)
        self._thread.start()

    def take(self, waiting: Waiting) -> None:
        """Make what can be made of KV that was read; returns at once. Over the bound it is dropped."""
        size = kv_bytes(waiting.kv)
        with self._lock:
            if self._bytes + size > self._limit:
                self.counts.add("dropped_bytes", "arriving", size)
                return
            self._bytes += size
        self._arrived.put(waiting)

    def close(self) -> None:
        """Make what has arrived, then end."""
        self._arrived.put(None)
        self._thread.join(timeout=30)

    # -- its thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        while (arrived := self._arrived.get()) is not None:
            try:
                self._make(arrived)
            except (KameraError, ValueError, RuntimeError) as error:
                logger.warning("chunk %s was not harvested: %s", arrived.ripe.chunk_id[:12], error)
            with self._lock:
                self._bytes -= kv_bytes(arrived.kv)

    def _make(self, arrived: Waiting) -> None:
        """Store what follows from a chunk's KV, or keep it until its canonical comes."""
        ripe, context = arrived.ripe, arrived.recipe.context
        store = self._stores.of(context.tenant)
        if ripe.kind != "exact":
            own = RowKey.of(context, ripe.kind, ripe.chunk_id).context
            if not store.has(own, ripe.chunk_id, (), ripe.kind):
                self._put(store, _canonical(arrived, own))
            if late := self._leave(context, ripe.chunk_id):
                self._patch(store, late)
        elif not self._patch(store, arrived):
            self._leave(context, ripe.chunk_id)
            self._waiting[context, ripe.chunk_id] = arrived
            self._kept += kv_bytes(arrived.kv)
            while self._kept > self._limit:
                oldest = self._leave(*next(iter(self._waiting)))
                self.counts.add("dropped_bytes", "waiting", 0 if oldest is None else kv_bytes(oldest.kv))

    def _leave(self, context: Context, chunk_id: str) -> Waiting | None:
        """The KV of a chunk that waits no longer."""
        waiting = self._waiting.pop((context, chunk_id), None)
        self._kept -= 0 if waiting is None else kv_bytes(waiting.kv)
        return waiting

    def _patch(self, store: ChunkStore, arrived: Waiting) -> bool:
        """Store a chunk's patch. False without its canonical."""
        ripe, context = arrived.ripe, arrived.recipe.context
        canonical = store.get_canonical(context, ripe.chunk_id)
        if canonical is None:
            return False
        row = store.info(context, ripe.chunk_id, ripe.antecedents, "exact")
        offset = uniform_offset(canonical.positions, ripe.positions)
        if not at_least(ripe.formed, "survivor") or offset is None:
            return True
        if row is not None and row.budget is not None and self._budget.met_by(row.budget, canonical.tokens):
            return True
        deltas = deficit(arrived.kv, canonical.kv, self._layout, offset)
        (patch, energy), filled = self._budget.form(deltas, self._layout, canonical.kv)
        info = {"energy": energy, **filled.to_info()}
        record = PatchRecord(ripe.chunk_id, context, ripe.antecedents, "exact", patch, ripe.formed, info)
        self._put(store, record)
        return True

    def _put(self, store: ChunkStore, record: CanonicalRecord | PatchRecord) -> None:
        store.put(record)
        row = store.info(record.context, record.chunk_id, record.antecedents, record.kind)
        self.counts.add("harvested_bytes", record.kind, 0 if row is None else row.bytes)


def _canonical(arrived: Waiting, own: Context) -> CanonicalRecord:
    ripe, recipe = arrived.ripe, arrived.recipe
    ids = torch.tensor(recipe.ids[ripe.start : ripe.stop], dtype=torch.int64)
    behind = 0 if ripe.kind == "anchor" else len(recipe.anchor_ids)
    # with every rotary layout that the connector takes, a text goes on behind the highest position
    advance = (int(ripe.positions.max()) + 1 - ripe.positions.amin(1)).tolist()
    return CanonicalRecord(
        ripe.chunk_id,
        own,
        ids,
        ripe.positions,
        arrived.kv,
        ripe.inputs,
        behind=behind,
        kind=ripe.kind,
        outline=Outline.of(ids, ripe.positions, advance, ripe.media),
    )
