"""The objects of a directory as they are read: verified to the last byte, damaged ones set aside."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from kamera import forks
from kamera.errors import CorruptChunk, StoreError, StoreReadOnly
from kamera.store.codec import Codec
from kamera.store.disk.claims import LOCK
from kamera.store.disk.files import LEFT_IN_PLACE, ObjectFiles
from kamera.store.disk.folder import Nested, NotAFile, stamp_of
from kamera.store.disk.index import Index
from kamera.store.disk.keep import Keep
from kamera.store.disk.marker import MARKER, open_directory
from kamera.store.disk.quarantine import Quarantine
from kamera.store.disk.reading import Readers
from kamera.store.disk.rows import Stamped
from kamera.store.fields import Header
from kamera.store.info import ObjectInfo, Quarantined
from kamera.store.keys import is_key
from kamera.store.pins import PinBook
from kamera.store.records import Record

logger = logging.getLogger(__name__)


class DiskObjects:
    """The objects under one directory; raises and is used as `DiskTier`."""

    def __init__(self, root: Path, codec: Codec, *, read_only: bool = False) -> None:
        self.root = root
        self.codec = codec
        self.pins = PinBook(Keep(root))
        with self._translated("open"):
            self._root = open_directory(root, codec.marker, make=not read_only)
            self.read_only = read_only or not os.access(root, os.W_OK)
            self._root.refuse_links()  # SQLite would follow one
            self._tmp, objects = (Nested(self._root, name) for name in ("tmp", "objects"))
            quarantine = Nested(self._root, "quarantine", stays=False)
            self._files = ObjectFiles(objects, self._tmp, codec)
            self._quarantine = Quarantine(quarantine)
            for folder in (objects, self._tmp, quarantine):
                self._prepare(folder)
        self.index = Index(root / "index.sqlite", self._files, codec, read_only=self.read_only)
        self._readers = Readers()
        self._names = forks.Lock()  # threads queue here, and ask for the processes' lock one at a time

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

    def header(self, key: str) -> Header | None:
        """The header of ``key``, its tensors unverified. Raises as the codec; nothing is moved."""
        with self._translated("read"):
            found = self._files.header(key)
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

    def rebuild_index(self) -> int:
        """Rebuild the rows from the files' headers; return their number."""
        with self._translated("list the objects"):
            return self.index.compare(afresh=True)

    def quarantined(self) -> list[Quarantined]:
        """The damaged objects in quarantine."""
        with self._translated("list the quarantine"):
            return self._quarantine.copies()

    def close(self) -> None:
        """Close the index; the objects are already safe."""
        self._readers.close()
        self.index.close()

    def _intact(self, key: str) -> bool:
        """True if the object is stored and may stay; a damaged one is quarantined."""
        if self._files.stamp(key) is None:
            return False
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

    def _set_aside(self, key: str, stamp: str | None, error: CorruptChunk) -> NoReturn:
        if self.read_only:
            raise error
        with self._translated("quarantine"):
            shard = self._files.shard(key)
            if shard is None:
                raise error
            with shard, self._renaming():
                if stamp is None or self._files.stamp(key) != stamp:  # no longer the file that was read
                    raise error
                place = self._quarantine.take(self._files, shard, key, str(error))
                self.index.drop(key)
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

    @contextlib.contextmanager
    def _renaming(self) -> Iterator[None]:
        """Exclude all other threads and processes from adding and removing names of objects."""
        with self._names, self._root.locked(MARKER):
            yield

    def _refusal(self, verb: str, error: OSError) -> StoreError:
        return StoreError(f"store {self.root}: cannot {verb}: {error}")

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
            raise self._refusal(verb, error) from error
