"""Objects of a directory read on threads: an object's groups in parallel, each verified by itself."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kamera.store.opened import ObjectRoom, OpenObject
from kamera.store.records import Record

_THREADS = 8
_INLINE = 1 << 20  # bytes; reading fewer takes less time than waking a thread


class ReadPool:
    """Threads that read and verify, one per processor, started when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def read(self, opened: OpenObject) -> Record:
        """The record, every byte of it verified; no thread reads on after this returns or raises.

        Raises `CorruptChunk`, and `OSError` as the system does.
        """
        room = opened.room()
        under_way = self._begun(room, opened.head.size)
        try:
            for group in under_way:
                group.result()
        finally:
            for group in under_way:
                group.cancel()
            wait(under_way)
        return room.record()

    def close(self) -> None:
        """Start no more reads, and wait for those under way."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _begun(self, room: ObjectRoom, size: int) -> list[Future[None]]:
        """Futures of the groups being filled; none if ``size`` bytes are few."""
        with self._lock:
            if size >= _INLINE and not self._closed:
                if self._pool is None:
                    threads = min(_THREADS, os.cpu_count() or 1)
                    self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kamera-read")
                return [self._pool.submit(room.fill, group) for group in room.groups]
        for group in room.groups:
            room.fill(group)
        return []
