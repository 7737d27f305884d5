"""The directory tier: one file per object, an index beside them, and a quarantine for damaged files.

A file appears whole or not at all (written aside, synced, renamed), and its row follows it. So the
files are always right, and a look-up by key asks nothing else. What is put together is written together: all
files aside, one sync, all names, one transaction for the rows, one more sync.

Order of locks, which prevents deadlock: claims of objects in the order of their names (`claims`), then the
lock for adding and removing names (`DiskObjects._renaming`), then the index's. Readers lock nothing.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from kamera.errors import CorruptChunk, KameraError, StoreError
from kamera.store.codec import Codec
from kamera.store.disk.claims import LOCK, Claims, claim, claimant
from kamera.store.disk.files import LEFT_IN_PLACE, file_of
from kamera.store.disk.folder import Folder, NotAFile, size_of, stamp_of
from kamera.store.disk.marker import MARKER
from kamera.store.disk.objects import DiskObjects
from kamera.store.disk.rows import Stamped
from kamera.store.info import ObjectInfo
from kamera.store.lower import File
from kamera.store.orders import PutOrder
from kamera.store.records import Record
from kamera.trust import outranks

__all__ = ["MARKER", "DiskTier"]

logger = logging.getLogger(__name__)

_PART = ".part"
_OURS = re.compile(r"([0-9a-f]{64})\.(part|lock)")
_CLAIM_SECONDS = 60.0
_STALE_SECONDS = 3600.0  # age of files to remove if they do not show that their writer is alive


class _File(NamedTuple):
    """An object's file, to be put over any other (``replace``), over that of a stamp, or over none."""

    info: ObjectInfo
    data: bytes
    replace: bool
    instead_of: str | None = None
    needs: str = ""


_Placed = str | Exception | None  # the stamp of a file in its place; None: another stays there


class DiskTier(DiskObjects):
    """Objects under one directory. Safe to use from several threads and processes.

    Every key passed in is a name of its ``codec``; else `ValueError` (`keys.is_key`).
    ``read_only``, or in a folder that cannot be written: nothing is changed, and a method that would change
    it raises `StoreReadOnly`. Raises `StoreError` when the operating system refuses, `StoreVersionError` for
    a directory of another format (which is left untouched).
    """

    def __init__(self, root: Path, codec: Codec, *, read_only: bool = False) -> None:
        super().__init__(root, codec, read_only=read_only)
        self.make_room: Callable[[str, int], None] | None = None
        """Called before ``size`` more bytes are written for an object; `write` passes its errors on."""
        self._syncs_all = self._root.syncs_all
        if not self.read_only:
            self.collect()

    def write(self, record: Record, *, replace: bool = True) -> Stamped | None:
        """`write_many` of one, whose error is raised."""
        [found] = self.write_many([PutOrder(self.codec.name(record.key), record, replace)])
        if isinstance(found, Exception):
            raise found
        return found

    def write_many(self, orders: Sequence[PutOrder]) -> list[Stamped | Exception | None]:
        """Store records of different names; return the row and stamp of each, or the error that refused it.

        When this returns, those without an error survive a loss of power. After any interruption, either the
        old or the new object is stored, of each by itself. Without ``replace`` a stored, intact object stays,
        and a patch that was formed behind stronger KV stays in any case: None is returned then. If several
        writers write an object at once, only one does.
        """
        infos: dict[str, ObjectInfo] = {}

        def files() -> Iterable[_File | Exception]:
            for order in orders:  # one at a time: the bytes of all would be in memory
                try:
                    created = round(time.time(), 3)
                    data = self.codec.encode(order.record, created)
                    info = infos[order.name] = self.codec.describe(order.record, created, len(data))
                    yield _File(info, data, order.replace, needs=order.needs)
                except (KameraError, ValueError) as error:
                    yield error

        try:
            placed = self._place([order.name for order in orders], files())
        except KameraError as error:
            return [error] * len(orders)
        return [
            (infos[order.name], found) if isinstance(found, str) else found
            for order, found in zip(orders, placed, strict=True)
        ]

    def adopt(self, info: ObjectInfo, data: bytes) -> str | None:
        """See `Lower`; an object stays only if it is intact."""
        return self._placed(_File(info, data, replace=False))

    def exchange(self, info: ObjectInfo, data: bytes, old: File) -> bool:
        """See `Lower`. What a remote has of the old file, it has of the new one."""
        stamp = self._placed(_File(info, data, replace=True, instead_of=old.stamp))
        if stamp is not None:
            self.index.notes.renew_sent(info.key, old.stamp, stamp)
        return stamp is not None

    def delete(self, key: str) -> bool:
        """Remove the object ``key``; return True if it existed."""
        self._writable("delete")
        with self._translated("delete"):
            gone = self._remove(key, None)
            self.index.drop(key)
            if gone:
                self._objects.made().sync()
        return gone

    def evict(self, key: str, stamp: str) -> bool:
        """Remove the object ``key`` if its file still has ``stamp``; return True if it was removed."""
        self._writable("evict")
        with self._translated("evict"):
            return self._remove(key, stamp)

    def collect(self) -> int:
        """Remove files left by dead writers; return their number."""
        self._writable("clear up")
        before = time.time() - _STALE_SECONDS
        removed = 0
        with self._translated("clear up"):
            tmp = self._tmp.there()
            for name in [] if tmp is None else tmp.names():
                removed += self._collected(self._tmp.made(), name, before)
        return removed

    def purge(self, file: str) -> None:
        """See `Lower`."""
        self._writable("delete")
        with self._translated("delete"):
            self._quarantine.drop(file)

    def _placed(self, file: _File) -> str | None:
        [found] = self._place([file.info.key], [file])
        if isinstance(found, Exception):
            raise found
        return found

    def _place(self, keys: Sequence[str], files: Iterable[_File | Exception]) -> list[_Placed]:
        """Put a file in the place of each key, unless another stays there; an error is its own file's.

        Raises the errors that concern all of them.
        """
        self._writable("write")
        placed: dict[str, _Placed] = {}
        begun: set[str] = set()
        unlisted: set[str] = set()
        with self._translated("write"), contextlib.ExitStack() as stack:
            claims = Claims(self._tmp.made())
            stack.callback(claims.close)
            # a descriptor of its own, which is told of every write that fails from now on
            disk = stack.enter_context(self._root.again()) if len(keys) > 1 and self._syncs_all else None
            try:
                self._claim(claims, keys, placed, begun)
                aside = self._write_aside(keys, files, placed, begun, disk)
                if aside and not self._bring(aside, placed, disk):
                    unlisted = {key for key in aside if isinstance(placed[key], str)}
            except BaseException:
                self._let_go(claims, begun, unlisted)
                raise
            refused = {key for key, found in placed.items() if isinstance(found, Exception)}
            self._let_go(claims, begun & refused, unlisted)
            return [placed[key] for key in keys]

    def _claim(
        self, claims: Claims, keys: Sequence[str], placed: dict[str, _Placed], begun: set[str]
    ) -> None:
        """Exclude other writers of the keys; files left by an interrupted writer are removed."""
        deadline = time.monotonic() + _CLAIM_SECONDS
        for key in sorted(keys):
            try:
                if not claims.take(key, max(0.0, deadline - time.monotonic())):
                    tmp = self._tmp.made()
                    placed[key] = StoreError(
                        f"store {self.root}: object {key} has been in another writer's hands for "
                        f"{_CLAIM_SECONDS:g} s: {claimant(tmp, key)} holds {tmp.path / (key + LOCK)}"
                    )
                elif claims.interrupted[key]:
                    begun.add(key)
                    self._clear(key)
                    begun.discard(key)
            except OSError as error:
                placed[key] = self._refusal("write", error)

    def _write_aside(
        self,
        keys: Sequence[str],
        files: Iterable[_File | Exception],
        placed: dict[str, _Placed],
        begun: set[str],
        disk: Folder | None,
    ) -> dict[str, tuple[_File, str]]:
        """Write what is to be put, and sync it: together by ``disk``, or one by one. Returns the stamps."""
        tmp = self._tmp.made()
        aside: dict[str, tuple[_File, str]] = {}
        grown = 0
        for key, file in zip(keys, files, strict=True):
            if key in placed:
                continue
            if isinstance(file, Exception) or isinstance(placed.get(file.needs), Exception):
                placed[key] = file if isinstance(file, Exception) else placed[file.needs]
                continue
            try:
                if file.instead_of is None and self._stays(file.info, file.replace):
                    placed[key] = None
                    continue
                if self.make_room is not None:
                    there = self._files.stamp(key)
                    more = len(file.data) - (0 if there is None else size_of(there))
                    self.make_room(key, grown + more)
                    grown += more
                begun.add(key)
                stamp = stamp_of(tmp.create(key + _PART, file.data, sync=disk is None))
                aside[key] = file._replace(data=b""), stamp
            except OSError as error:
                placed[key] = self._refusal("write", error)
            except KameraError as error:
                placed[key] = error
        if disk is not None and aside:
            disk.sync_all()
        return aside

    def _bring(
        self, aside: dict[str, tuple[_File, str]], placed: dict[str, _Placed], disk: Folder | None
    ) -> bool:
        """Give the files that were written aside their names, and sync those. False if they have no rows."""
        tmp, objects = self._tmp.made(), self._objects.made()
        rows: list[Stamped] = []
        with self._renaming():
            for key, (file, stamp) in aside.items():
                if isinstance(placed.get(file.needs), Exception):
                    placed[key] = placed[file.needs]
                    continue
                try:
                    if file.instead_of is not None and self._files.stamp(key) != file.instead_of:
                        tmp.remove(key + _PART)
                        placed[key] = None
                        continue
                    tmp.move(key + _PART, objects, file_of(key))
                except OSError as error:
                    placed[key] = self._refusal("write", error)
                    continue
                rows.append((file.info, stamp))
            listed = not rows or self.index.put(rows)
        if disk is not None:
            disk.sync_all()
        else:
            objects.sync()
        placed.update((info.key, stamp) for info, stamp in rows)
        return listed

    def _let_go(self, claims: Claims, failed: set[str], unlisted: set[str]) -> None:
        """Settle the claims; what ``failed`` is cleared first.

        Where that is impossible, and for what is ``unlisted``, the claim's file tells listings and writers.
        """
        for key in claims.interrupted:
            with contextlib.suppress(OSError, KameraError):
                if key not in unlisted and (key not in failed or self._clear(key)):
                    claims.settle(key)

    def _stays(self, info: ObjectInfo, replace: bool) -> bool:
        """True if ``info`` must not take the place of the object stored under its key."""
        try:
            there = self._files.peek(info.key) if info.formed is not None and replace else None
        except (CorruptChunk, *LEFT_IN_PLACE):
            there = None
        outranked = there is not None and outranks(there[0].formed, info.formed)
        return (outranked or not replace) and self._intact(info.key)

    def _remove(self, key: str, stamp: str | None) -> bool:
        """Remove the object ``key``, if it has ``stamp`` (None: any); return True if this removed it."""
        with self._renaming():
            if stamp is not None and self._files.stamp(key) != stamp:
                self.index.later([key])  # its row is of another file
                return False
            gone = self._objects.made().remove(file_of(key))
        if gone:
            self.index.later([key])
        return gone

    def _clear(self, key: str) -> bool:
        """Repair after an interrupted write: remove the partial file, sync the name, correct the row.

        False if the row cannot be corrected now.
        """
        self._tmp.made().remove(key + _PART)
        self._objects.made().sync()
        return self.index.settle(key)

    def _collected(self, folder: Folder, name: str, before: float) -> bool:
        match = _OURS.fullmatch(name)
        if match is None:  # another program's: only its age can tell
            status = folder.status(name)
            return status is not None and status.st_mtime < before and folder.remove(name)
        key = match.group(1)
        try:
            mine = claim(folder, key, 0)
        except NotAFile as error:  # the next writer of that object is told again
            logger.warning("not cleared up: %s", error)
            return False
        if mine is None:  # its writer lives
            return False
        try:
            done = self._clear(key)
            if done:
                mine.settle()
        finally:
            mine.close()
        return done
