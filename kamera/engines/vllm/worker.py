"""The worker's side: what a recipe names is read from the store, turned, patched, and written into pages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kamera.engines.materials import read_anchor, read_part
from kamera.engines.vllm.harvest import HarvestChunk, Harvester
from kamera.engines.vllm.layout import EngineLayout
from kamera.engines.vllm.pages import EnginePages
from kamera.engines.vllm.serving import PageLoad
from kamera.engines.vllm.stores import Stores
from kamera.errors import KameraError
from kamera.ops import KV, Blocks, kv_slice, layer_groups
from kamera.ops.kernels import serve

logger = logging.getLogger(__name__)


@dataclass
class WorkerSide:
    """Loads spans in one worker. One thread uses it."""

    stores: Stores
    layout: EngineLayout
    pages: EnginePages
    dtype: torch.dtype
    harvester: Harvester | None = None

    def __post_init__(self) -> None:
        self._ended_ids, self._failed_ids = set[str](), set[str]()

    def load(self, loads: Sequence[PageLoad]) -> None:
        """Write the spans of ``loads``. One of which an object cannot be had fails as a whole."""
        for load in loads:
            try:
                self.pages.write(self._span(load), self.pages.slots(load.block_ids, load.start, load.stop))
            except (KameraError, ValueError, OSError) as error:
                logger.warning("request %s is computed: %s", load.request_id, error)
                self._failed_ids.add(load.request_id)
            self._ended_ids.add(load.request_id)

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Requests whose loads are over since the last call, and those of them that could not be loaded."""
        ids = self._ended_ids, self._failed_ids
        self._ended_ids, self._failed_ids = set(), set()
        return ids

    def harvest(self, chunks: Sequence[HarvestChunk]) -> None:
        """Copy what was computed out of the pages, for the harvester, which the first worker has."""
        for ripe in chunks:
            slots = self.pages.slots(ripe.block_ids, ripe.start, ripe.start + len(ripe.ids))
            kv = self.pages.read(slots)
            if self.harvester is not None:
                self.harvester.take(ripe, kv)

    # -- inside --------------------------------------------------------------------------------

    def _span(self, load: PageLoad) -> KV:
        """KV of the tokens that are loaded, as stores hold it."""
        recipe, layers = load.recipe, self.layout.layers
        store, end = self.stores.of(recipe.context.tenant), len(recipe.anchor_ids)
        parts = [part for part in recipe.parts if load.start < part.stop and part.start < load.stop]
        whole = self._room(max(load.stop, end, *(part.stop for part in parts)))
        if load.start < end:
            zero_offset = (0,) * self.layout.axes
            serve(kv_slice(whole, 0, end), read_anchor(store, recipe).kv, None, layers, zero_offset)
        for part in parts:
            record, patch = read_part(store, part)
            serve(kv_slice(whole, part.start, part.stop), record.kv, patch, layers, part.offset)
        return kv_slice(whole, load.start, load.stop)

    def _room(self, tokens: int) -> KV:
        """Memory for the KV of ``tokens``, all layers."""
        layers = self.layout.layers
        groups = layer_groups(layers)
        blocks = [
            {
                c.name: torch.empty(len(group), c.heads, tokens, c.dim, dtype=self.dtype)
                for c in layers[group[0]].channels
            }
            for group in groups
        ]
        return Blocks(blocks, groups)
