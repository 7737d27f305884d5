"""What a recipe names, read from a store and verified: the same for every executor."""

from __future__ import annotations

from typing import TypeVar

from kamera.engines.recipe import Part, Recipe, RowKey
from kamera.errors import NotTransferable, StaleRecipe
from kamera.ops import Patch
from kamera.store import CanonicalRecord, ChunkStore, PatchRecord, find_conditioned

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
        found = find_conditioned(store, row.context, row.chunk_id, row.antecedents, row.base)
    else:
        found = store.get_canonical(row.context, row.chunk_id)
    record = _there(found, row)
    _check_ids(record, part.ids)
    patch = None if part.patch is None else _patch(store, part, part.patch)
    low = tuple(record.positions.amin(1).tolist())
    if tuple(a - b for a, b in zip(part.position, low, strict=True)) != part.offset:
        raise StaleRecipe(
            f"chunk {part.chunk_id[:12]} was computed elsewhere than the recipe says: take a new one"
        )
    return record, patch


def _patch(store: ChunkStore, part: Part, row: RowKey) -> Patch:
    named = row.context, row.chunk_id, row.antecedents, row.kind, row.base
    record = _there(store.get_patch(*named), row)
    info = store.info(*named)  # after it was read: one that came in between is refused, too
    told = row.created, row.formed
    if info is None or (info.created, record.formed) != told or record.tokens not in (0, part.length):
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
