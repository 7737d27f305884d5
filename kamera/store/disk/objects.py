"""The objects of a directory as they are read: verified to the last byte, damaged ones set aside."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from kamera import forks
from kamera.errors import CorruptChunk, StoreError, StoreReadOnly
from kamera.store.codec import UNREADABLE, Codec
from kamera.store.disk.files import ObjectFiles, file_of
from kamera.store.disk.folder import Folder, Nested, NotAFile, stamp_of
from kamera.store.disk.index import Index
from kamera.store.disk.keep import PinFile
from kamera.store.disk.marker import MARKER, open_directory
from kamera.store.fields import Header
from kamera.store.info import ObjectInfo, Quarantined
from kamera.store.keys import is_key
from kamera.store.opened import Fetched
from kamera.store.pins import PinBook
from kamera.store.sources import BytesSource, FileSource

logger = logging.getLogger(__name__)

_READERS = 8  # most threads that read the pieces of an object


class DiskObjects:
    """The objects under one directory; raises and is used as `DiskTier`."""

    def __init__(self, root: Path, codec: Codec, *, read_only: bool = False) -> None:
        self.root = root
        self.url = str(root)
        self.codec = codec
        self.pins = PinBook(PinFile(root))
        with self._translate("open"):
            self._root = open_directory(root, codec.marker, make=not read_only)
            self.read_only = read_only or not os.access(root, os.W_OK)
            for name, status in self._root.statuses():  # SQLite would follow a link
                if stat.S_ISLNK(status.st_mode):
                    raise NotAFile(f"{root / name} is a link, and a store follows no links: remove it")
            self._tmp, self._objects = (Nested(self._root, name) for name in ("tmp", "objects"))
            self._quarantine = Nested(self._root, "quarantine", stays=False)
            self._files = ObjectFiles(self._objects, self._tmp, codec)
            if not self.read_only:
                for folder in (self._objects, self._tmp, self._quarantine):
                    self._prepare(folder)
                self._root.sync()  # who made them may have died since
        self.index = Index(root / "index.sqlite", self._files, codec, read_only=self.read_only)
        self._readers = ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1), "kamera-read")
        self._names = forks.Lock()  # threads queue here, and ask for the processes' lock one at a time

    def stamp(self, key: str) -> str | None:
        """A text that changes whenever the object's file does; None if there is no such file."""
        with self._translate("read"):
            return self._files.stamp(key)

    def read(self, key: str, *, whole: bool = False) -> Fetched | None:
        """The object ``key``, verified to the last byte; None if there is none. ``whole``: and its bytes.

        Anything else there goes to quarantine, and `CorruptChunk` is raised. Raises `StoreVersionError` and
        `WrongKey` as `Codec.decode`: then it stays where it is.
        """
        with self._translate("read"), self._open(key) as file:
            if file is None:
                return None
            stamp = stamp_of(file.status)
            with self._quarantining(key, stamp):
                data = file.read(0, file.size) if whole else b""
                source = BytesSource(data) if whole else file
                open_object = self.codec.open(source, key, str(self._files.path(key)))
                return Fetched(open_object.read(self._readers), open_object.head.info, stamp, data)

    def load(self, key: str) -> bytes | None:
        """The bytes under ``key``, unverified; not counted as a use."""
        with self._translate("read"), self._open(key) as file:
            return None if file is None else file.read(0, file.size)

    def info(self, key: str) -> ObjectInfo | None:
        """The description of ``key`` from its file's header: callers decide by it, and a row may be wrong."""
        stamp = self.stamp(key)
        if stamp is None:
            return None
        with self._translate("read"), self._quarantining(key, stamp):
            row = self._files.peek(key)
        return None if row is None else row[0]

    def names(self) -> list[str]:
        """Names of all objects, of all tenants; from the files."""
        with self._translate("list the objects"):
            return self._files.names()

    def header(self, key: str) -> Header | None:
        """The header of ``key``, its tensors unverified. Raises as the codec; nothing is moved."""
        with self._translate("read"):
            header_and_status = self._files.header(key)
        return None if header_and_status is None else header_and_status[0]

    def is_stored_intact(self, key: str) -> bool:
        """True if ``key`` is stored durably and intact, as far as its header, its row and its stamp tell."""
        with self._translate("read"):
            # one that somebody writes has a name that may not be on the disk yet
            return self._agrees(key) and key not in self._files.names_in_traces()

    def copies(self) -> list[Quarantined]:
        """All copies in quarantine, by name and time; of all tenants."""
        with self._translate("list the quarantine"):
            folder = self._quarantine.existing_folder()
            files = [] if folder is None else folder.statuses()
        copies = (Quarantined.of(f, s.st_size if stat.S_ISREG(s.st_mode) else 0) for f, s in files)
        return [copy for copy in copies if copy is not None]

    def copy_info(self, file: str) -> ObjectInfo | None:
        """The description of a copy from its header, of any tenant; None if it cannot be read."""
        with self._translate("read"):
            return self._describe(self._quarantine.ensure(), file)

    def list_unfinished(self) -> dict[str, ObjectInfo | None]:
        """Files that are being written, each with its description, as far as that is written."""
        with self._translate("read"):
            tmp = self._tmp.existing_folder()
            return {} if tmp is None else {file: self._describe(tmp, file) for file in tmp.names()}

    def close(self) -> None:
        """Close the index; the objects are already safe."""
        self._readers.shutdown(cancel_futures=True)
        self.index.close()

    def _intact(self, key: str) -> bool:
        """True if the object is stored and may stay; a damaged one is quarantined."""
        if self._files.stamp(key) is None:
            return False
        try:
            return self._agrees(key) or self.read(key) is not None
        except CorruptChunk:
            return False
        except UNREADABLE:  # no damage: a reader with the right version or key still finds it
            return True

    def _agrees(self, key: str) -> bool:
        """True if file, header and row of ``key`` are of one write."""
        stamp = self._files.stamp(key) if is_key(key) else None
        row = None if stamp is None else self.index.get(key)
        if row is None or row[1] != stamp:
            return False
        try:
            return self._files.peek(key) == row
        except UNREADABLE:
            return False

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[FileSource | None]:
        """The file of ``key``; what cannot be an object goes to quarantine."""
        try:
            file = self._files.open(key)
        except NotAFile as error:
            self._set_aside(key, self._files.stamp(key), CorruptChunk(str(error)))
        with contextlib.closing(file) if file is not None else contextlib.nullcontext():
            yield file

    def _set_aside(self, key: str, stamp: str | None, error: CorruptChunk) -> NoReturn:
        if self.read_only:
            raise error
        with self._translate("quarantine"), self._exclude_renames():
            if stamp is None or self._files.stamp(key) != stamp:  # no longer the file that was read
                raise error
            folder, copy = self._quarantine.ensure(), f"{key}.{time.time_ns()}.safetensors"
            self._objects.ensure().move(file_of(key), folder, copy)
            self.index.drop(key)
        place = folder.path / copy
        logger.warning("damaged object %s moved to %s", key, place)
        raise type(error)(f"{error}; moved to {place}") from error

    def _describe(self, folder: Folder, file: str) -> ObjectInfo | None:
        """The object in a file whose name begins with its own, by its header; None if it cannot be read."""
        try:
            with contextlib.closing(FileSource(folder.open(file))) as source:
                return self.codec.read_info(source, file.partition(".")[0], file)
        except (*UNREADABLE, FileNotFoundError, NotAFile):
            return None

    def _prepare(self, folder: Nested) -> None:
        """Make a folder now, if the disk has room for it."""
        try:
            folder.ensure()
        except OSError as error:
            logger.warning("%s is not made for now: %s", folder.path, error)

    @contextlib.contextmanager
    def _exclude_renames(self) -> Iterator[None]:
        """Exclude all other threads and processes from adding and removing names of objects."""
        with self._names, self._root.locked(MARKER):
            yield

    def _refusal(self, verb: str, error: OSError) -> StoreError:
        return StoreError(f"store {self.root}: cannot {verb}: {error}")

    def _changing(self, verb: str) -> contextlib.AbstractContextManager[None]:
        """Inside, the directory is changed. Raises `StoreReadOnly` where it is read only."""
        if self.read_only:
            raise StoreReadOnly(
                f"store {self.root}: cannot {verb}: it is open to be read only: open it without "
                "read_only= in a folder that can be written"
            )
        return self._translate(verb)

    @contextlib.contextmanager
    def _quarantining(self, key: str, stamp: str) -> Iterator[None]:
        """On `CorruptChunk`, quarantine the damaged file and name its new path."""
        try:
            yield
        except CorruptChunk as error:
            self._set_aside(key, stamp, error)

    @contextlib.contextmanager
    def _translate(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._refusal(verb, error) from error
