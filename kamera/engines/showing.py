"""Recipes shown in the live KV of an engine that runs when it is asked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kamera.engines.base import Engine, LiveKV, Span
from kamera.engines.materials import read_anchor, read_part
from kamera.engines.moves import Written
from kamera.engines.recipe import Recipe
from kamera.errors import StaleRecipe
from kamera.ops import uniform_offset
from kamera.store import CanonicalRecord, ChunkStore, Context


class LiveExecutor:
    """Shows recipes in ``live``, out of the objects of a store; behind it the engine can be asked."""

    def __init__(self, engine: Engine, store: ChunkStore) -> None:
        self.live: LiveKV = engine.live()
        self._engine = engine
        self._store = store

    def show(self, recipe: Recipe) -> Written:
        """Bring the KV of a recipe, its anchor in front, to where the model attends to it.

        It shows all of the recipe or raises, and then nothing of it: IncompatibleChunk (of another backbone,
        tenant or form), NotTransferable (a part whose KV its own window has alone), StaleRecipe (an object is
        gone, or another by now), CorruptChunk.
        """
        engine, own = self._engine, recipe.context
        recipe.check(Context(engine.fingerprint, own.anchor, self._store.tenant, self._store.kv))
        anchor = read_anchor(self._store, recipe)
        parts = [read_part(self._store, part) for part in recipe.parts]
        _check_places(engine, recipe, [record for record, _ in parts])
        spans = [Span(engine.place(anchor.kv), None, (0,) * engine.axes)]
        for part, (record, patch) in zip(recipe.parts, parts, strict=True):
            spans.append(Span(engine.place(record.kv), patch, part.offset))
        return self.live.show(spans)


def _check_places(engine: Engine, recipe: Recipe, records: Sequence[CanonicalRecord]) -> None:
    """Raise StaleRecipe unless the parts come to stand where ``engine`` counts their tokens."""
    anchor = torch.tensor(recipe.anchor_ids, dtype=torch.int64)
    ids = [anchor, *(record.input_ids for record in records)]
    places = engine.positions(ids, [{}, *(dict(record.inputs) for record in records)])
    _, *own = places.split([len(i) for i in ids], dim=1)
    for part, record, positions in zip(recipe.parts, records, own, strict=True):
        if uniform_offset(record.positions, positions) != part.offset:
            raise StaleRecipe(
                f"chunk {part.chunk_id[:12]} does not stand where the recipe says: this engine counts "
                "positions in another way"
            )
