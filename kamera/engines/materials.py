"""What a recipe names, read from a store and verified for every engine, and shown in the live KV of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from kamera.engines.base import Engine, LiveKV, Span
from kamera.engines.moves import Written
from kamera.engines.recipe import Part, Recipe, RowKey
from kamera.errors import NotTransferable, StaleRecipe
from kamera.ops import Patch, uniform_offset
from kamera.store import CanonicalRecord, ChunkStore, Context, PatchRecord, find_conditioned

Found = TypeVar("Found", CanonicalRecord, PatchRecord)


def read_anchor(store: ChunkStore, recipe: Recipe) -> CanonicalRecord:
    """The KV of a recipe's anchor, which stands unturned. Raises as `read_part`."""
    if recipe.anchor is None:
        raise NotTransferable(recipe.missing[0])
    record = _there(store.get_anchor(recipe.anchor.context), recipe.anchor)
    _check_ids(record, recipe.anchor_ids)
    return record


def read_part(store: ChunkStore, part: Part) -> tuple[CanonicalRecord, Patch | None]:
    """What a part of a recipe names, compared with what it says: it is shown as R(offset)·(KV + patch).

    In a store of codes the record's KV is a `CodedKV`. It may be shared, and must not be written in place.
    Raises NotTransferable for a part that is missing, StaleRecipe for an object that is gone or another by
    now, and the store's errors: CorruptChunk, WrongKey, IncompatibleChunk (another tenant or model).
    """
    if part.kv is None:
        raise NotTransferable(f"chunk {part.chunk_id[:12]}: {part.missing}")
    row = part.kv
    if row.kind == "conditioned":
        candidate = find_conditioned(store, row.context, row.chunk_id, row.antecedents, row.base)
    else:
        candidate = store.get_canonical(row.context, row.chunk_id)
    record = _there(candidate, row)
    _check_ids(record, part.ids)
    patch = None if part.patch is None else _patch(store, part, part.patch)
    low = tuple(record.positions.amin(1).tolist())
    if tuple(a - b for a, b in zip(part.position, low, strict=True)) != part.offset:
        raise StaleRecipe(
            f"chunk {part.chunk_id[:12]} was computed elsewhere than the recipe says: take a new one"
        )
    return record, patch


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


def _patch(store: ChunkStore, part: Part, row: RowKey) -> Patch:
    name = row.context, row.chunk_id, row.antecedents, row.kind, row.base
    record = _there(store.get_patch(*name), row)
    info = store.info(*name)  # after it was read: one that came in between is refused, too
    version = row.created, row.formed
    if info is None or (info.created, record.formed) != version or record.tokens not in (0, part.length):
        raise StaleRecipe(f"the patch of chunk {row.chunk_id[:12]} is another by now: take a new recipe")
    return record.patch if row.rank is None else record.patch.truncate(row.rank)


def _there(record: Found | None, row: RowKey) -> Found:
    if record is None:
        raise StaleRecipe(
            f"the {row.kind} of chunk {row.chunk_id[:12]} is not in the store: take a new recipe"
        )
    return record


def _check_ids(record: CanonicalRecord, ids: tuple[int, ...]) -> None:
    if tuple(record.input_ids.tolist()) != ids:
        raise StaleRecipe(
            f"chunk {record.chunk_id[:12]} has other token ids than the recipe says: take a new one"
        )


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
