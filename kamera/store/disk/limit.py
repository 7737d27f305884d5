"""The bound of a directory: its bytes, with least-recently-used eviction."""

from __future__ import annotations

import logging
import threading
import time

from kamera.errors import StoreError, StoreFull
from kamera.store.disk.tier import DiskTier
from kamera.store.eviction import choose

logger = logging.getLogger(__name__)

_SLACK = 0.9  # share of a cache's limit left after an eviction, so that not every object causes one


class DiskBounds:
    """Keeps ``disk`` at or below ``limit`` bytes (None: no bound), the bytes of other processes included.

    Canonicals leave with their patches, encodings after their canonicals, and what is pinned stays. From a
    ``cache`` only what the remote has may leave; there an object without room is kept all the same.
    """

    def __init__(
        self,
        disk: DiskTier,
        limit: int | None,
        cache: bool = False,
    ) -> None:
        self._disk = disk
        self._limit = limit
        self._cache = cache
        self._stuck = False  # no more may leave a cache until the remote has more
        self._lock = threading.Lock()
        if limit is not None:
            disk.make_room = self.make_room

    def make_room(self, name: str, size: int) -> None:
        """Remove objects so that ``size`` more bytes fit. Raises `StoreFull` if that is impossible."""
        limit = self._limit
        if limit is None or self._stuck:
            return
        try:
            with self._lock:
                held = self._disk.index.bytes()
                if held + size > limit and (self._cache or size <= limit):
                    held -= self._evict(held + size - int(limit * (_SLACK if self._cache else 1)), name)
        except StoreError as error:
            if not self._cache:
                raise
            logger.warning("the cache %s is not trimmed: %s", self._disk.root, error)
            return
        if held + size > limit and not self._cache:
            raise StoreFull(
                f"store {self._disk.root}: {size} bytes more are over its disk_limit of {limit}, and what is "
                "pinned stays: raise the limit, or unpin something"
            )
        self._stuck = held + size > limit

    def trim(self) -> None:
        """Let go of what no longer fits a cache: it was opened, or its remote has more now."""
        self._stuck = False
        self.make_room("", 0)

    def _evict(self, excess: int, coming: str) -> int:
        """Remove at least ``excess`` bytes if that many may leave; return the bytes removed."""
        gone = 0
        while gone < excess:
            rows = list(self._disk.index.weighed())
            rest = sum(row.bytes for row in rows) - (excess - gone)
            with self._disk.pins.cell.alone():
                kept = self._disk.pins.kept() | {coming}
                if self._cache:
                    kept |= {row.key for row in self._disk.index.notes.unsent(rows)}
                victims = [found for found, _ in choose(rows, kept, rest, time.time(), by="use")]
                freed = sum(one.bytes for one in victims if self._disk.delete(one.key, one.stamp))
            if not freed:
                break
            gone += freed
        return gone
