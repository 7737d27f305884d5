"""Bounds of a directory: its bytes, with least-recently-used eviction, and a ttl for unused objects."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kamera.errors import StoreFull
from kamera.store.disk.tier import DiskTier
from kamera.store.info import Weighed
from kamera.store.keys import PATCH_KINDS

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
        rows = list(self._disk.index.weighed())
        patches: dict[tuple[str, ...], list[Weighed]] = {}
        referring: dict[tuple[str, ...], list[Weighed]] = {}
        for row in rows:
            if row.kind in PATCH_KINDS:
                patches.setdefault(row.group, []).append(row)
            elif row.encoding:
                referring.setdefault(row.encoding, []).append(row)

        def turn(row: Weighed) -> tuple[float, bool]:
            users = referring.get(row.group, ()) if row.kind == "encoding" else ()
            return max(map(last_use, (row, *users))), row.kind == "encoding"

        gone, left = 0, set()
        with self._disk.pins.place.alone():
            kept = self._disk.pins.kept()
            for row in sorted(rows, key=turn):
                if gone >= excess:
                    break
                # patches leave first (they serve only with their canonical), canonicals before encodings
                leaving = [*patches.get(row.group, ()), row] if row.kind == "canonical" else [row]
                users = referring.get(row.group, ()) if row.kind == "encoding" else ()
                if any(one.key in kept or one.key == coming for one in leaving):
                    continue
                if any(one.key not in left for one in users):
                    continue
                for one in leaving:
                    if one.key not in left and self._disk.evict(one.key, one.stamp):
                        gone += one.bytes
                    left.add(one.key)
        return gone


def last_use(row: Weighed) -> float:
    """Time at which an object was last used, or else made (seconds since 1970)."""
    return row.created if row.used is None else row.used
