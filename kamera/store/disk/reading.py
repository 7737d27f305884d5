"""One object of a directory being read: its groups side by side, each verified by itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager

import torch

from kamera.ops.kv import KV
from kamera.store.disk.folder import stamp_of
from kamera.store.groups import layer_group
from kamera.store.info import ObjectInfo
from kamera.store.opened import Opened, Room
from kamera.store.records import CanonicalRecord, Header, PatchRecord, layer_kv
from kamera.store.sources import FileSource

_THREADS = 8
_INLINE = 1 << 20  # bytes; less is read sooner than another thread wakes


class Readers:
    """Threads that read and verify, as many as there are processors, made when they are first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def start(self, fill: Callable[[str], None], groups: Iterable[str], size: int) -> dict[str, Future[None]]:
        """``fill`` for each of ``groups``, ``size`` bytes in all: begun, or done if that is little."""
        with self._lock:
            if size >= _INLINE and not self._closed:
                if self._pool is None:
                    threads = min(_THREADS, os.cpu_count() or 1)
                    self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kamera-read")
                return {group: self._pool.submit(fill, group) for group in groups}
        return {group: _done(fill, group) for group in groups}

    def close(self) -> None:
        """Begin nothing more, and wait for what is under way."""
        with self._lock:
            self._closed = True
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class Reading:
    """An object whose header is verified and whose tensors are on their way. `DiskTier.begin` makes it.

    ``errors`` is what its errors are raised through: it sets damaged files aside.
    """

    def __init__(
        self, file: FileSource, opened: Opened, errors: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.stamp = stamp_of(file.status)
        self.info: ObjectInfo = opened.head.info
        self._file = file
        self._opened = opened
        self._errors = errors
        self._room: Room | None = None
        self._under_way: dict[str, Future[None]] = {}

    @property
    def header(self) -> Header:
        """What the object's header says."""
        return self._opened.head.header

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Those of the groups that are read; they mean nothing before `wait`."""
        assert self._room is not None
        return self._room.tensors

    def start(self, readers: Readers, groups: Collection[str] | None, pinned: bool) -> None:
        """Begin to fill ``groups`` (None: all) in their order in the file, those of them that there are."""
        there = self._opened.head.groups
        wanted = [name for name in there if groups is None or name in groups]
        self._room = self._opened.room(wanted, pinned=pinned)
        size = sum(there[name].size for name in wanted)
        self._under_way = readers.start(self._room.fill, wanted, size)

    def wait(self, group: str) -> None:
        """Return when ``group`` is filled and verified, if the object has it. Raises as `DiskTier.begin`."""
        if group in self._under_way:
            with self._errors():
                self._under_way[group].result()

    def layer(self, index: int) -> KV:
        """A canonical's layer as a `KV` of it alone, once it is verified. Raises as `DiskTier.begin`,
        and `ValueError` if there is no such layer."""
        count = len(self.header["layers"])
        if not 0 <= index < count:
            raise ValueError(f"layer {index} of a canonical of {count} layers")
        self.wait(layer_group(index))
        return layer_kv(self.header, self.tensors, index)

    def record(self) -> CanonicalRecord | PatchRecord:
        """The record, once all of it is verified. Raises as `DiskTier.begin`."""
        for group in self._under_way:
            self.wait(group)
        assert self._room is not None
        return self._room.record()

    def close(self) -> None:
        """Give up what is under way, and let go of the file; may be called again."""
        for future in self._under_way.values():
            future.cancel()
        wait(self._under_way.values())
        self._file.close()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _done(fill: Callable[[str], None], group: str) -> Future[None]:
    future: Future[None] = Future()
    try:
        fill(group)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)
    return future
