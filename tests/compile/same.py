"""What two stores must have in common to be called equal."""

from __future__ import annotations

from kamera import ChunkStore
from kamera.store.format import encode


def contents(store: ChunkStore) -> dict[str, bytes]:
    """Every object's file, by key, as it were had all been written at one time: `created` is left out."""
    found = {}
    for info in store.ls():
        if info.kind == "canonical":
            record = store.get_canonical(info.context, info.chunk_id)
        else:
            record = store.get_patch(info.context, info.chunk_id, info.antecedents, info.kind)
        found[record.key] = encode(record, 0.0)
    return found
