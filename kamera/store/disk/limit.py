"""Bounds of a directory: its bytes, with least-recently-used eviction, and a ttl for unused objects."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kamera.errors import StoreFull
from kamera.store.disk.tier import DiskTier
from kamera.store.eviction import choose, last_use

logger = logging.getLogger(__name__)


class Bounds:
    """Keeps ``disk`` at or below ``limit`` bytes, and removes objects not used for ``ttl`` seconds.

    None: no such bound. Pinned objects stay, and so does the canonical of a pinned patch; a canonical is
    removed with its patches, an encoding after the canonicals that refer to it. ``clock`` returns seconds
    since 1970. Safe to use from threads and processes; each process counts the others' bytes before it
    writes.
    """

    def __init__(
        self,
        disk: DiskTier,
        limit: int | None,
        ttl: float | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl is a time in seconds, more than 0, got {ttl}")
        self._disk = disk
        self.limit = limit
        self._ttl = ttl
        self._clock = clock
        self._lock = threading.Lock()

    def make_room(self, name: str, size: int) -> None:
        """Remove objects so that ``size`` more bytes fit. Raises `StoreFull` if that is impossible."""
        limit = self.limit
        if limit is None:
            return
        with self._lock:
            held = self._disk.index.bytes()
            if size <= limit and held + size > limit:
                held -= self._evict(held + size - limit, name)
        if held + size > limit:
            raise StoreFull(
                f"store {self._disk.root}: {size} bytes more are over its disk_limit of {limit}, and what is "
                "pinned stays: raise the limit, or unpin something"
            )

    def is_over(self, name: str) -> bool:
        """True if the object ``name`` is past its ttl and unpinned; removes it unless read-only."""
        if self._ttl is None:
            return False
        stamp = self._disk.stamp(name)
        if stamp is None:
            return False
        used = self._disk.index.notes.last_use(name)
        last = max(used or 0.0, int(stamp.rpartition("-")[2]) / 1e9)
        if self._clock() - last <= self._ttl:
            return False
        with self._disk.pins.place.alone():
            if name in self._disk.pins.kept():
                return False
            if not self._disk.read_only:
                self._disk.evict(name, stamp)
        return True

    def sweep(self) -> None:
        """Remove all objects past their ttl."""
        if self._ttl is not None:
            since = self._clock() - self._ttl
            for row in [row for row in self._disk.index.weighed() if last_use(row) < since]:
                self.is_over(row.key)

    def _evict(self, excess: int, coming: str) -> int:
        """Remove at least ``excess`` bytes if that many may leave; return the bytes removed."""
        gone = 0
        while gone < excess:
            rows = list(self._disk.index.weighed())
            rest = sum(row.bytes for row in rows) - (excess - gone)
            with self._disk.pins.place.alone():
                kept = self._disk.pins.kept() | {coming}
                victims = [found for found, _ in choose(rows, kept, rest, self._clock(), by="use")]
                freed = sum(one.bytes for one in victims if self._disk.evict(one.key, one.stamp))
            if not freed:
                break
            gone += freed
        return gone
