"""The directory tier: one file per object, an index beside them, and a quarantine for damaged files.

A file appears whole or not at all (written aside, synced, renamed), and its row follows it. So the
files are always right, and a look-up by key asks nothing else.

Order of locks, which prevents deadlock: an object's claim (`claims`), then its folder's lock for adding
and removing names (`Folder.locked`), then the index's. Readers lock nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from kamera.errors import CorruptChunk, KameraError, StoreError, StoreReadOnly
from kamera.ops import outranks
from kamera.store.codec import Codec
from kamera.store.disk.claims import LOCK, claim, claimant
from kamera.store.disk.files import LEFT_IN_PLACE, ObjectFiles
from kamera.store.disk.folder import Folder, Nested, NotAFile, size_of, stamp_of
from kamera.store.disk.index import Index
from kamera.store.disk.marker import ASIDE, MARKER, open_directory
from kamera.store.disk.quarantine import Quarantine
from kamera.store.disk.reading import Readers
from kamera.store.disk.rows import Stamped
from kamera.store.info import ObjectInfo, Quarantined
from kamera.store.keys import is_key
from kamera.store.records import Record

__all__ = ["MARKER", "DiskTier"]

logger = logging.getLogger(__name__)

_PART = ".part"
_OURS = re.compile(r"([0-9a-f]{64})\.(part|lock)")
_CLAIM_SECONDS = 60.0
_STALE_SECONDS = 3600.0  # age of files to remove if they do not show that their writer is alive


class DiskTier:
    """Objects under one directory. Safe to use from several threads and processes.

    Every key passed in is a name of its ``codec``; else `ValueError` (`keys.is_key`).
    ``read_only``, or in a folder that cannot be written: nothing is changed, and a method that would change
    it raises `StoreReadOnly`. Raises `StoreError` when the operating system refuses, `StoreVersionError` for
    a directory of another format (which is left untouched).
    """

    def __init__(self, root: Path, codec: Codec, *, read_only: bool = False) -> None:
        self.root = root
        self.codec = codec
        with self._translated("open"):
            self._root = open_directory(root, codec.marker, make=not read_only)
            self.read_only = read_only or not os.access(root, os.W_OK)
            self._root.refuse_links()  # SQLite would follow one
            self._tmp, quarantine, objects = (Nested(self._root, n) for n in ("tmp", "quarantine", "objects"))
            self._files = ObjectFiles(objects, codec)
            self._quarantine = Quarantine(quarantine)
            for folder in (objects, self._tmp, quarantine):
                self._prepare(folder)
        self.index = Index(
            root / "index.sqlite",
            self._files,
            codec.veil,
            codec.unveil,
            codec.sign_row,
            read_only=self.read_only,
        )
        self._readers = Readers()
        self.make_room: Callable[[str, int], None] = lambda name, size: None
        """Called before ``size`` more bytes are written for an object; `write` passes its errors on."""
        if not self.read_only:
            self.collect()

    def stamp(self, key: str) -> str | None:
        """A text that changes whenever the object's file does; None if there is no such file."""
        with self._translated("read"):
            return self._files.stamp(key)

    def read(self, key: str) -> tuple[Record, Stamped] | None:
        """The object ``key``, verified to the last byte, with its row and stamp.

        A damaged file goes to ``quarantine/`` and `CorruptChunk` is raised. None if there is none.
        """
        with self._translated("read"):
            try:
                file = self._files.open(key)
            except NotAFile as error:
                self._set_aside(key, self._files.stamp(key), CorruptChunk(str(error)))
            if file is None:
                return None
            stamp = stamp_of(file.status)
            with contextlib.closing(file), self._quarantining(key, stamp):
                opened = self.codec.open(file, key, str(self._files.path(key)))
                return self._readers.read(opened), (opened.head.info, stamp)

    def read_file(self, key: str) -> tuple[bytes, str] | None:
        """The file of ``key``, verified to the last byte, and its stamp; otherwise as `read`."""
        found = self.load(key)
        if found is not None:
            with self._translated("read"), self._quarantining(key, found[1]):
                self.codec.decode(found[0], key, str(self._files.path(key)))
        return found

    def load(self, key: str) -> tuple[bytes, str] | None:
        """The file of ``key``, unverified, and its stamp; None if there is none."""
        with self._translated("read"):
            try:
                return self._files.load(key)
            except NotAFile as error:
                self._set_aside(key, self._files.stamp(key), CorruptChunk(str(error)))

    def info(self, key: str) -> ObjectInfo | None:
        """The description of ``key`` from its file's header: callers decide by it, and a row may be wrong."""
        stamp = self.stamp(key)
        if stamp is None:
            return None
        with self._translated("read"), self._quarantining(key, stamp):
            found = self._files.peek(key)
        return None if found is None else found[0]

    def names(self) -> list[str]:
        """Names of all objects, from their files."""
        with self._translated("list the objects"):
            return self._files.names()

    def header(self, key: str) -> ObjectInfo | None:
        """The header of the file of ``key``, unverified. Raises as the codec; nothing is moved."""
        with self._translated("read"):
            found = self._files.peek(key)
        return None if found is None else found[0]

    def holds(self, key: str) -> bool:
        """True if ``key`` is stored durably and, as far as can be told without reading it, intact.

        A file that was written to since its row was made, or whose header is damaged, is not intact. Bytes
        after the header that the disk itself changed are not detected without reading.
        """
        with self._translated("read"):
            tmp = self._tmp.there()
            # a claim: a write is under way, and its name may not be on the disk yet
            return self._agrees(key) and (tmp is None or tmp.status(key + LOCK) is None)

    def write(self, record: Record, *, replace: bool = True) -> Stamped | None:
        """Store ``record``, in place of the object under its key; return its row and stamp.

        When this returns, the object survives a loss of power. After any interruption, either the old or
        the new object is stored. Without ``replace`` a stored, intact object stays, and a patch that was
        formed behind stronger KV stays in any case: None is returned then. If several writers write it at
        once, only one does.
        """
        created = round(time.time(), 3)
        data = self.codec.encode(record, created)
        info = self.codec.describe(record, created, len(data))
        stamp = self._place(info, data, replace=replace)
        return None if stamp is None else (info, stamp)

    def adopt(self, info: ObjectInfo, data: bytes) -> str | None:
        """Store the file of an object that was written elsewhere; return its stamp.

        None if there is an intact object under its key, which stays unchanged.
        """
        return self._place(info, data, replace=False)

    def exchange(self, info: ObjectInfo, data: bytes, stamp: str) -> str | None:
        """Replace the file of ``stamp`` by ``data``; return the new stamp, or None if that file is gone."""
        return self._place(info, data, replace=True, instead_of=stamp)

    def delete(self, key: str) -> bool:
        """Remove the object ``key``; return True if it existed."""
        self._writable("delete")
        with self._translated("delete"):
            gone = self._remove(key, None)
            self.index.drop(key)
            if gone:
                self._files.sync(key)
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
        with self._translated("clear up"):
            removed = self._quarantine.collect(before)
            for folder, prefix in ((self._tmp.there(), ""), (self._root, ASIDE)):
                for name in [] if folder is None else folder.names():
                    if folder is not None and name.startswith(prefix):
                        removed += self._collected(folder, name, before)
        return removed

    def rebuild_index(self) -> int:
        """Rebuild the rows from the files' headers; return their number."""
        with self._translated("list the objects"):
            return self.index.rebuild()

    def quarantined(self) -> list[Quarantined]:
        """The damaged objects in quarantine."""
        with self._translated("list the quarantine"):
            return self._quarantine.copies()

    def drop_quarantined(self, name: str) -> int:
        """Delete one copy (by its ``file``) or all copies of the object ``name``; return their number."""
        self._writable("delete")
        with self._translated("delete"):
            return self._quarantine.drop(name)

    def close(self) -> None:
        """Close the index; the objects are already safe."""
        self._readers.close()
        self.index.close()

    def _intact(self, key: str) -> bool:
        """True if the object is stored and may stay; a damaged one is quarantined."""
        try:
            return self._agrees(key) or self.read(key) is not None
        except CorruptChunk:
            return False
        except LEFT_IN_PLACE:
            return True

    def _agrees(self, key: str) -> bool:
        """True if file, header and row of ``key`` are of one write."""
        stamp = self._files.stamp(key) if is_key(key) else None
        row = None if stamp is None else self.index.get(key)
        if row is None or row[1] != stamp:
            return False
        try:
            return self._files.peek(key) == row
        except (CorruptChunk, *LEFT_IN_PLACE):
            return False

    def _stays(self, info: ObjectInfo, replace: bool) -> bool:
        """True if ``info`` must not take the place of the object stored under its key."""
        try:
            there = self._files.peek(info.key) if info.formed is not None and replace else None
        except (CorruptChunk, *LEFT_IN_PLACE):
            there = None
        outranked = there is not None and outranks(there[0].formed, info.formed)
        return (outranked or not replace) and self._intact(info.key)

    def _place(
        self, info: ObjectInfo, data: bytes, *, replace: bool, instead_of: str | None = None
    ) -> str | None:
        self._writable("write")
        key = info.key
        with self._translated("write"), self._claimed(key):
            if instead_of is None and self._stays(info, replace):
                return None
            there = self._files.stamp(key)
            self.make_room(key, len(data) - (0 if there is None else size_of(there)))
            tmp = self._tmp.made()
            with self._files.prepare(key) as shard:
                stamp = stamp_of(tmp.create(key + _PART, data))
                with shard.locked():
                    if instead_of is not None and self._files.stamp(key) != instead_of:
                        tmp.remove(key + _PART)
                        return None
                    before = shard.changed
                    self._files.bring(tmp, key + _PART, shard, key)
                    if self.index.put(info, stamp):
                        self.index.moved(key[:2], before, shard.changed)
                shard.sync()
        return stamp

    def _remove(self, key: str, stamp: str | None) -> bool:
        """Remove the object ``key``, if it has ``stamp`` (None: any); return True if this removed it."""
        shard = self._files.shard(key)
        if shard is None:
            return False
        with shard, shard.locked():
            if stamp is not None and self._files.stamp(key) != stamp:
                return False
            before = shard.changed
            gone = self._files.remove(shard, key)
            if gone:
                self.index.later(key)
                self.index.moved(key[:2], before, shard.changed)
        return gone

    @contextlib.contextmanager
    def _claimed(self, key: str) -> Iterator[None]:
        """Exclude other writers of ``key``; files left by an interrupted writer are removed."""
        mine = claim(self._tmp.made(), key, _CLAIM_SECONDS)
        if mine is None:
            tmp = self._tmp.made()
            raise StoreError(
                f"store {self.root}: object {key} has been in another writer's hands for "
                f"{_CLAIM_SECONDS:g} s: {claimant(tmp, key)} holds {tmp.path / (key + LOCK)}"
            )
        try:
            try:
                if mine.interrupted:
                    self._clear(key)
                yield
            except BaseException:
                # if this fails too, the claim's file tells the next writer
                with contextlib.suppress(OSError, KameraError):
                    self._clear(key)
                    mine.settle()
                raise
            mine.settle()
        finally:
            mine.close()

    def _clear(self, key: str) -> None:
        """Repair after an interrupted write: remove the partial file, sync the name, correct the row."""
        self._tmp.made().remove(key + _PART)
        self._files.sync(key)
        self.index.settle(key)

    def _collected(self, folder: Folder, name: str, before: float) -> bool:
        match = _OURS.fullmatch(name)
        if match is None:  # of a marker, or another program's: only its age can tell
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
            self._clear(key)
            mine.settle()
        finally:
            mine.close()
        return True

    def _set_aside(self, key: str, stamp: str | None, error: CorruptChunk) -> NoReturn:
        if self.read_only:
            raise error
        with self._translated("quarantine"):
            shard = self._files.shard(key)
            if shard is None:
                raise error
            with shard, shard.locked():
                if stamp is None or self._files.stamp(key) != stamp:  # no longer the file that was read
                    raise error
                before = shard.changed
                place = self._quarantine.take(self._files, shard, key, str(error))
                self.index.drop(key)
                self.index.moved(key[:2], before, shard.changed)
        logger.warning("damaged object %s moved to %s", key, place)
        raise type(error)(f"{error}; moved to {place}") from error

    def _prepare(self, folder: Nested) -> None:
        """Make a folder now, if the disk has room for it."""
        if folder.there() is None and not self.read_only:
            try:
                folder.made()
            except OSError as error:
                logger.warning("%s is not made for now: %s", folder.path, error)
            else:
                self._root.sync()

    def _writable(self, verb: str) -> None:
        if self.read_only:
            raise StoreReadOnly(
                f"store {self.root}: cannot {verb}: it is open to be read only: open it without "
                "read_only= in a folder that can be written"
            )

    @contextlib.contextmanager
    def _quarantining(self, key: str, stamp: str) -> Iterator[None]:
        """On `CorruptChunk`, quarantine the damaged file and name its new path."""
        try:
            yield
        except CorruptChunk as error:
            self._set_aside(key, stamp, error)

    @contextlib.contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"store {self.root}: cannot {verb}: {error}") from error
