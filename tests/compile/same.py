"""What two stores must have in common to be called equal."""

from __future__ import annotations

from kamera import ChunkStore
from kamera.store import StoreAdmin
from kamera.store.format import Codec


def contents(store: ChunkStore) -> dict[str, bytes]:
    """Every object's file, by key, as it were had all been written at one time: `created` is left out."""
    found = {}
    for info in store.ls():
        record = StoreAdmin(store).read(info.key)
        found[record.key] = Codec().encode(record, 0.0)
    return found
