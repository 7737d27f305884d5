"""Bounds of a directory: its bytes, with least-recently-used eviction, and a ttl for unused objects."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kamera.errors import StoreError, StoreFull
from kamera.store.disk.tier import DiskTier
from kamera.store.eviction import choose, last_use

logger = logging.getLogger(__name__)

_SLACK = 0.9  # share of a cache's limit left after an eviction, so that not every object causes one


class DiskBounds:
    """Keeps ``disk`` at or below ``limit`` bytes, and removes objects not used for ``ttl`` seconds.

    None: no such bound. Pinned objects stay, and so does the canonical of a pinned patch; a canonical is
    removed with its patches, an encoding after the canonicals that refer to it. In a ``cache`` of a remote
    only what that has may leave, and what finds no room is kept all the same. ``clock`` returns seconds
    since 1970. Safe to use from threads and processes; each process counts the others' bytes before it
    writes.
    """

    def __init__(
        self,
        disk: DiskTier,
        limit: int | None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.time,
        cache: bool = False,
    ) -> None:
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl is a time in seconds, more than 0, got {ttl}")
        self._disk = disk
        self._limit = limit
        self._ttl = ttl
        self._clock = clock
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
        with self._disk.pins.cell.alone():
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
            with self._disk.pins.cell.alone():
                kept = self._disk.pins.kept() | {coming}
                if self._cache:
                    sent = self._disk.index.notes.sent()
                    kept |= {row.key for row in rows if sent.get(row.key) != row.stamp}
                victims = [found for found, _ in choose(rows, kept, rest, self._clock(), by="use")]
                freed = sum(one.bytes for one in victims if self._disk.evict(one.key, one.stamp))
            if not freed:
                break
            gone += freed
        return gone
