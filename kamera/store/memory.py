"""The memory tier: decoded records up to a byte limit; the least recently used leave first, pins stay."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container
from typing import NamedTuple

from kamera.store.info import BY_AGE, MemoryStats, ObjectInfo
from kamera.store.pins import PinBook, PinCell
from kamera.store.records import Record


class _Entry(NamedTuple):
    record: Record
    info: ObjectInfo
    stamp: str
    nbytes: int


class MemoryTier:
    """Records by key, at most ``limit`` bytes of tensors. Safe to use from several threads.

    A record is valid for one ``stamp`` (of its file): a look-up with another drops it and is a miss. What is
    pinned or in ``names_to_keep`` is not evicted; a record for which that leaves no room is not kept.
    """

    def __init__(self, limit: int, names_to_keep: Container[str] = ()) -> None:
        self.limit = limit
        self._names_to_keep = names_to_keep
        self.pins = PinBook(PinCell(), most=limit // 2)  # so that the rest works on
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._chunks: dict[str, set[str]] = {}  # the keys of each chunk's records
        self._lock = threading.Lock()
        self._bytes = self._hits = self._misses = self._evictions = 0

    def get(self, key: str, stamp: str | None = "") -> Record | None:
        """The record kept under ``key`` for ``stamp``, now the most recently used."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.stamp != stamp:
                self._remove(key)
                entry = None
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return entry.record

    def put(self, record: Record, info: ObjectInfo, stamp: str = "") -> bool:
        """Keep ``record``, which nobody writes to any more, evicting others if needed; True if it is kept."""
        entry = _Entry(record, info, stamp, record.nbytes)
        with self._lock:
            self._remove(info.key)
            excess = self._bytes + entry.nbytes - self.limit
            victims, pinned = [], self.pins.names_to_keep() if excess > 0 else set()
            for key, other in self._entries.items():
                if excess <= 0:
                    break
                if key not in pinned and key not in self._names_to_keep:
                    victims.append(key)
                    excess -= other.nbytes
            if excess > 0:
                return False
            for key in victims:
                self._remove(key)
            self._evictions += len(victims)
            self._entries[info.key] = entry
            self._chunks.setdefault(info.chunk_id, set()).add(info.key)
            self._bytes += entry.nbytes
            return True

    def drop(self, key: str) -> bool:
        """Forget ``key``; True if it was kept."""
        with self._lock:
            return self._remove(key)

    def peek(self, key: str) -> tuple[Record, ObjectInfo] | None:
        """The record under ``key`` and its info; not counted as a use, so neither hit nor miss."""
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else (entry.record, entry.info)

    def info(self, key: str, stamp: str | None = None) -> ObjectInfo | None:
        """The info of the record under ``key`` (for that ``stamp``, if given); neither hit nor miss."""
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None or stamp not in (None, entry.stamp) else entry.info

    def infos(self, chunk_id: str | None = None) -> list[ObjectInfo]:
        """Infos of all records kept, or of those of one chunk, oldest first."""
        with self._lock:
            keys = self._entries if chunk_id is None else self._chunks.get(chunk_id, ())
            infos = [self._entries[key].info for key in keys]
        return sorted(infos, key=BY_AGE)

    def stats(self) -> MemoryStats:
        """Counters since the tier was made, and its present content."""
        with self._lock:
            return MemoryStats(
                objects=len(self._entries),
                bytes=self._bytes,
                limit=self.limit,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )

    def clear(self) -> None:
        """Forget everything; the counters stay."""
        with self._lock:
            self._entries.clear()
            self._chunks.clear()
            self._bytes = 0

    def _remove(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._bytes -= entry.nbytes
        chunk = self._chunks[entry.info.chunk_id]
        chunk.discard(key)
        if not chunk:
            del self._chunks[entry.info.chunk_id]
        return True
