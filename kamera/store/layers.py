"""A canonical's layers out of whatever tier has them: from a directory one without the rest, or in turn."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from kamera.errors import CorruptChunk
from kamera.ops.kv import LayerKV
from kamera.store.disk.reading import Reading
from kamera.store.groups import layer_group
from kamera.store.records import CanonicalRecord, PatchRecord, layer_of
from kamera.store.stream import LayerStream
from kamera.store.tiers import Tiers


def read_layer(tiers: Tiers, name: str, index: int) -> LayerKV | None:
    """One layer of the canonical ``name``. `ValueError` if it has no such layer."""
    try:
        reading = _begin(tiers, name, [layer_group(index)])
        if reading is not None:
            with reading:
                return reading.layer(index)[0]
    except CorruptChunk:
        if tiers.remote is None:
            raise
    record = tiers.get(name)
    return layer_of(record.kv, index)[0] if isinstance(record, CanonicalRecord) else None


def open_stream(tiers: Tiers, name: str, pinned: bool) -> LayerStream | None:
    """The layers of the canonical ``name`` in order."""
    try:
        reading = _begin(tiers, name, None, pinned)
        if reading is not None:
            return LayerStream.reading(reading, partial(_promote, tiers, name, reading))
    except CorruptChunk:
        if tiers.remote is None:
            raise
    record = tiers.get(name)
    return LayerStream.of(record) if isinstance(record, CanonicalRecord) else None


def _begin(tiers: Tiers, name: str, groups: Collection[str] | None, pinned: bool = False) -> Reading | None:
    """Begin to read ``name`` from the disk; None if it is in memory, or not there."""
    disk = tiers.disk
    if disk is None or tiers.memory.info(name) is not None or not tiers.has_here(name):
        return None
    disk.index.used(name)
    return disk.begin(name, groups, pinned=pinned)


def _promote(tiers: Tiers, name: str, reading: Reading, record: CanonicalRecord | PatchRecord) -> None:
    """Keep what was read, unless it was replaced or deleted meanwhile."""
    assert tiers.disk is not None
    if tiers.disk.stamp(name) == reading.stamp:
        tiers.memory.put(record, reading.info, reading.stamp)
