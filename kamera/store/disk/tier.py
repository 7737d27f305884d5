"""The directory tier: one file per object, an index beside them, and a quarantine for damaged files.

A file appears whole or not at all (written aside, synced, renamed), and its row follows it. So the
files are always right, and a look-up by key asks nothing else. What is put together is written together: all
files aside, one sync, all names, one transaction for the rows, one more sync.

Writers of one object do not wait for each other: each writes a file of its own, and whoever comes to the name
second sees what is there by then. Order of locks, which prevents deadlock: a writer's own (`traces`), the
lock for adding and removing names (`DiskObjects._exclude_renames`), the index's. Readers lock nothing.
"""

from __future__ import annotations

import contextlib
import logging
import stat
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kamera.errors import KameraError, StoreError, StoreFull
from kamera.store.codec import UNREADABLE, Codec
from kamera.store.disk.files import file_of
from kamera.store.disk.folder import Folder, size_of, stamp_of
from kamera.store.disk.marker import MARKER
from kamera.store.disk.objects import DiskObjects
from kamera.store.disk.rows import Stamped
from kamera.store.disk.syncing import sync_all, syncs_all
from kamera.store.disk.traces import LOCK, PART, Trace
from kamera.store.eviction import choose
from kamera.store.info import ObjectInfo, Quarantined
from kamera.store.orders import PutOrder, refuse_dependent
from kamera.store.records import Record
from kamera.trust import outranks

__all__ = ["MARKER", "DiskTier", "evict_over_limit"]

logger = logging.getLogger(__name__)

_SLACK = 0.9  # share of a cache's limit left after an eviction, so that not every object causes one
_STALE_SECONDS = 3600.0  # age of files to remove if they do not show that their writer is alive


_Aside = tuple[PutOrder, Stamped, str | None]
"""What was written aside, and the stamp of the file that was in its place then."""


class DiskTier(DiskObjects):
    """Objects under one directory. Safe to use from several threads and processes.

    Every key passed in is a name of its ``codec``; else `ValueError` (`keys.is_key`).
    ``read_only``, or in a folder that cannot be written: nothing is changed, and a method that would change
    it raises `StoreReadOnly`. With a ``limit`` its objects, those of other processes included, take at most
    so many bytes, but for what others write at the same moment: those used least recently leave, canonicals
    with their patches, encodings after their canonicals, and what is pinned stays. From a ``cache`` only what
    its remote has may leave; there an object without room is kept all the same. Raises `StoreError` when the
    operating system refuses, `StoreVersionError` for a directory of another format (which is left untouched).
    """

    def __init__(
        self,
        root: Path,
        codec: Codec,
        *,
        read_only: bool = False,
        limit: int | None = None,
        cache: bool = False,
    ) -> None:
        super().__init__(root, codec, read_only=read_only)
        self._limit = limit
        self._cache = cache
        self._stuck = False  # no more may leave a cache until the remote has more
        self._evicting = threading.Lock()
        self._syncs_all = syncs_all(self._root.descriptor)
        if not self.read_only:
            self.remove_leftovers()

    def write_many(self, orders: Sequence[PutOrder]) -> list[Stamped | Exception | None]:
        """Store records of different names; return the row and stamp of each, or the error that refused it.

        When this returns, those without an error survive a loss of power. After any interruption, either the
        old or the new object is stored, of each by itself. Without ``replace`` a stored, intact object stays,
        and a patch that was formed behind stronger KV stays in any case: None is returned then, and so it is
        if another writer was faster.
        """
        results: dict[str, Stamped | Exception | None] = {}
        try:
            if orders:
                self._write(orders, results)
        except KameraError as error:
            return [error] * len(orders)
        return [results[order.name] for order in orders]

    def delete(self, key: str, stamp: str | None = None) -> bool:
        """Remove the object ``key``; True if this removed it: a loss of power does not bring it back.

        With a ``stamp`` only if its file still has that, and without waiting for the disk.
        """
        with self._changing("delete" if stamp is None else "evict"):
            with self._exclude_renames():  # as a row is written, or it could be one that was written since
                gone = stamp in (None, self._files.stamp(key)) and self._objects.ensure().remove(file_of(key))
                if stamp is None:
                    self.index.drop(key)
            if stamp is not None:
                self.index.mark_doubtful([key])  # its row is of another file, or of none
            elif gone:
                self._objects.ensure().sync()
            return gone

    def remove_leftovers(self) -> int:
        """Remove files left by dead writers; return their number."""
        with self._changing("clear up"):
            tmp = self._tmp.existing_folder()
            return 0 if tmp is None else self._clear_up(tmp)

    def delete_copy(self, file: str) -> None:
        """Delete a copy in quarantine."""
        with self._changing("delete"):
            folder = self._quarantine.existing_folder()
            if folder is not None and Quarantined.of(file, 0) and folder.remove(file):
                folder.sync()

    def _make_room(self, name: str, size: int) -> None:
        """Remove objects so that ``size`` more bytes fit. Raises `StoreFull` if that is impossible."""
        limit = self._limit
        if limit is None or self._stuck:
            return
        try:
            with self._evicting:
                stored_bytes = self.index.bytes()
                if stored_bytes + size > limit and (self._cache or size <= limit):
                    stored_bytes = self._evict(int(limit * (_SLACK if self._cache else 1)) - size, name)
        except StoreError as error:
            if not self._cache:
                raise
            logger.warning("the cache %s is not trimmed: %s", self.root, error)
            return
        if stored_bytes + size > limit and not self._cache:
            raise StoreFull(
                f"store {self.root}: {size} bytes more are over its disk_limit of {limit}, and what is "
                "pinned stays: raise the limit, or unpin something"
            )
        self._stuck = stored_bytes + size > limit

    def _evict(self, most: int, new_name: str) -> int:
        """Remove objects until ``most`` bytes are left, if so many may leave; return the bytes left."""
        stamps: set[tuple[str, str]] = set()
        while True:
            rows = list(self.index.weigh())  # without what other processes removed meanwhile
            last, stamps = stamps, {(row.key, row.stamp) for row in rows}
            with self.pins.cell.exclude_others():
                names_to_keep = self.pins.names_to_keep() | {new_name}
                if self._cache:
                    names_to_keep |= {row.key for row in self.index.notes.unsent_rows(rows)}
                victims = [victim for victim, _ in choose(rows, names_to_keep, most, time.time(), by="use")]
                for one in victims:
                    self.delete(one.key, one.stamp)
            if not victims or stamps == last:  # nothing may leave, or nothing does
                return sum(row.bytes for row in rows)

    def _write(self, orders: Sequence[PutOrder], results: dict[str, Stamped | Exception | None]) -> None:
        """Write each order unless a stored object stays; ``results`` gets what became of each."""
        is_done = False
        with self._changing("write"), contextlib.ExitStack() as stack:
            tmp = self._tmp.ensure()
            self._clear_up(tmp)
            trace = Trace.begin(tmp, [order.name for order in orders])
            stack.callback(trace.close)
            # a descriptor of its own, which is told of every write that fails from now on
            disk = stack.enter_context(self._root.sub("tmp")) if len(orders) > 1 and self._syncs_all else None
            try:
                parts = self._write_aside(orders, results, trace, disk)
                has_rows = self._bring(parts, results, trace, disk)
                is_done = has_rows and not any(isinstance(result, Exception) for result in results.values())
            finally:
                with contextlib.suppress(OSError, KameraError):
                    if is_done or self._clear(trace):
                        trace.settle()

    def _write_aside(
        self,
        orders: Sequence[PutOrder],
        results: dict[str, Stamped | Exception | None],
        trace: Trace,
        disk: Folder | None,
    ) -> list[_Aside]:
        """Write what is to be put, and sync it: together by ``disk``, or one by one."""
        tmp, parts, new_bytes = self._tmp.ensure(), list[_Aside](), 0
        for order in orders:  # one at a time: the bytes of all would be in memory
            name = order.name
            if refuse_dependent(order, results):
                continue
            try:
                info, data = order.file or self._file(order.record)
                old_stamp = self._files.stamp(name)
                if self._stays(info, order.replace):
                    results[name] = None
                    continue
                growth = len(data) - (0 if old_stamp is None else size_of(old_stamp))
                self._make_room(name, new_bytes + growth)
                new_bytes += growth
                stamp = stamp_of(tmp.create(trace.part(name), data, sync=disk is None))
                parts.append((order, (info, stamp), old_stamp))
            except OSError as error:
                results[name] = self._refusal("write", error)
            except (KameraError, ValueError) as error:
                results[name] = error
        if disk is not None and parts:
            sync_all(disk.descriptor)
        return parts

    def _file(self, record: Record) -> tuple[ObjectInfo, bytes]:
        """The file of ``record`` as it is written now, and its info. Raises as `Codec.encode`."""
        created = round(time.time(), 3)
        data = self.codec.encode(record, created)
        return self.codec.describe(record, created, len(data)), data

    def _bring(
        self,
        parts: Sequence[_Aside],
        results: dict[str, Stamped | Exception | None],
        trace: Trace,
        disk: Folder | None,
    ) -> bool:
        """Give what was written aside its name, and sync those. False if it has no rows.

        The names of what stays are synced, too: another writer may have given them a moment ago.
        """
        tmp, objects = self._tmp.ensure(), self._objects.ensure()
        rows: list[Stamped] = []
        with self._exclude_renames():
            for order, row, old_stamp in parts:
                name = order.name
                if refuse_dependent(order, results):
                    continue
                try:
                    if self._gives_way(row[0], order.replace, old_stamp):
                        tmp.remove(trace.part(name))
                        results[name] = None
                        continue
                    tmp.move(trace.part(name), objects, file_of(name))
                except OSError as error:
                    results[name] = self._refusal("write", error)
                    continue
                rows.append(row)
            has_rows = not rows or self.index.put(rows)
        if disk is not None:
            sync_all(disk.descriptor)
        else:
            objects.sync()
        results.update((row[0].key, row) for row in rows)
        return has_rows

    def _gives_way(self, info: ObjectInfo, replace: bool, old_stamp: str | None) -> bool:
        """True if another file than that of ``old_stamp`` came to its place since, and stays there."""
        now = self._files.stamp(info.key)
        return now not in (None, old_stamp) and (not replace or self._outranks(info))

    def _outranks(self, info: ObjectInfo) -> bool:
        """True if the object stored under the key of ``info`` was formed behind stronger KV."""
        try:
            row = None if info.formed is None else self._files.peek(info.key)
        except UNREADABLE:
            row = None
        return row is not None and outranks(row[0].formed, info.formed)

    def _stays(self, info: ObjectInfo, replace: bool) -> bool:
        """True if ``info`` must not take the place of the object stored under its key."""
        return (not replace or self._outranks(info)) and self._intact(info.key)

    def _clear_up(self, tmp: Folder) -> int:
        """Clear up after dead writers; return the number of files removed."""
        count = 0
        for file in tmp.names():
            if not file.endswith(LOCK):
                count += self._is_left_over(tmp, file) and tmp.remove(file)
                continue
            trace = Trace.take_over(tmp, file)
            if trace is not None:
                try:
                    with contextlib.suppress(OSError, KameraError):
                        parts = sum(tmp.status(trace.part(name)) is not None for name in trace.names)
                        if self._clear(trace):
                            trace.settle()
                            count += parts + 1
                finally:
                    trace.close()
        return count

    def _is_left_over(self, tmp: Folder, file: str) -> bool:
        """True for a part without a trace, which comes before it and goes after it; and for an old file."""
        if file.endswith(PART):
            return tmp.status(f"{file.split('.')[-2]}{LOCK}") is None
        status = tmp.status(file)
        if status is None or stat.S_ISDIR(status.st_mode):
            return False
        return status.st_mtime < time.time() - _STALE_SECONDS

    def _clear(self, trace: Trace) -> bool:
        """Remove the parts of an interrupted write, and correct its rows; False if that must wait."""
        for name in trace.names:
            self._tmp.ensure().remove(trace.part(name))
        self._objects.ensure().sync()
        return self.index.correct_rows(trace.names)


def evict_over_limit(cache: DiskTier) -> None:
    """Let go of what no longer fits a cache: it was opened, or its remote has more now."""
    cache._stuck = False
    cache._make_room("", 0)
