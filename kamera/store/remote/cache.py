"""A directory as cache of a remote, and its eviction."""

from __future__ import annotations

import logging
import threading

from kamera.errors import StoreError
from kamera.store.disk.tier import DiskTier
from kamera.store.eviction import last_use
from kamera.store.info import Weighed

logger = logging.getLogger(__name__)

_SLACK = 0.9  # share of the limit left after a trim, so that not every object causes one


class DiskCache:
    """Keeps ``disk`` below ``limit`` bytes (None: no limit). Safe to use from threads and processes.

    Only objects that the remote ``url`` confirmed are evicted, and none that is pinned. Raises
    `StoreError` if the directory is the cache of another remote.
    """

    def __init__(self, disk: DiskTier, url: str, limit: int | None) -> None:
        self._disk = disk
        self._limit = limit
        with disk.pins.place.changing() as pages:
            if pages.remote not in (None, url):
                raise StoreError(
                    f"{disk.root} is the cache of {pages.remote}, not of {url}: give each remote a "
                    "directory of its own"
                )
            pages.remote = url
        self._lock = threading.Lock()
        self._bytes = 0
        self._stuck = False  # no more may be evicted until the remote has confirmed more
        self._trim()

    def unsent(self, tenant: str) -> list[str]:
        """The tenant's objects whose files the remote did not confirm, oldest first."""
        sent = self._disk.index.notes.sent()
        rows = [row for row in self._disk.index.weighed(tenant) if sent.get(row.key) != row.stamp]
        return [row.key for row in sorted(rows, key=lambda row: (row.created, row.key))]

    def sent(self, name: str, stamp: str) -> None:
        """Note that the remote has the file of ``stamp``."""
        self._disk.index.notes.note_sent(name, stamp)
        with self._lock:
            self._stuck = False

    def gone(self, name: str) -> None:
        """Note that the file was deleted."""
        self._disk.index.notes.note_sent(name, None)

    def renewed(self, name: str, old: str, new: str) -> None:
        """Note that the file of stamp ``old`` was re-encrypted under another key, as that of ``new``."""
        self._disk.index.notes.renew_sent(name, old, new)

    def grew(self, count: int) -> None:
        """Note ``count`` bytes written to the disk; evict if the limit is exceeded."""
        with self._lock:
            self._bytes += count
            if self._limit is None or self._bytes <= self._limit or self._stuck:
                return
        self._trim()

    def _trim(self) -> None:
        limit = self._limit
        if limit is None:
            return
        with self._lock:
            try:
                rows = list(self._disk.index.weighed())  # other processes write here too
                self._bytes = sum(row.bytes for row in rows)
                if self._bytes > limit:
                    self._evict(rows, int(limit * _SLACK))
                    self._stuck = self._bytes > limit
            except StoreError as error:  # a cache that is too large still serves
                logger.warning("the cache %s is not trimmed: %s", self._disk.root, error)

    def _evict(self, rows: list[Weighed], target: int) -> None:
        sent, pinned = self._disk.index.notes.sent(), self._disk.pins.kept()
        for row in sorted(rows, key=last_use):
            if self._bytes <= target:
                return
            if sent.get(row.key) == row.stamp and row.key not in pinned:
                if self._disk.evict(row.key, row.stamp):
                    self._bytes -= row.bytes
                self._disk.index.notes.note_sent(row.key, None)
