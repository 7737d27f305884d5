"""The directory tier: one file per object, an index beside them, and a place for damaged files.

A file appears whole or not at all (written aside, synced, renamed), and its row follows it. So the
files are always right, and the index is repaired whenever the two disagree.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from kamera.errors import CorruptChunk, StoreError, StoreVersionError
from kamera.store.codec import Codec
from kamera.store.format import DIRECTORY_VERSION
from kamera.store.index import Index, Stamped
from kamera.store.info import ObjectInfo, VerifyReport
from kamera.store.keys import is_key
from kamera.store.records import CanonicalRecord, PatchRecord

logger = logging.getLogger(__name__)

MARKER = "kamera-store.json"
_MARKER_TEXT = json.dumps({"format": DIRECTORY_VERSION})


class DiskTier:
    """Objects under one directory. Safe to use from several threads and processes.

    Every key it is given is a name of its ``codec`` and satisfies `keys.is_key`. Raises `StoreError`
    when the operating system refuses, `StoreVersionError` for a directory of a newer format (which is
    left untouched).
    """

    def __init__(self, root: Path, codec: Codec) -> None:
        self.root = root
        self.codec = codec
        with self._translated("open"):
            self._claim()
            for name in ("objects", "tmp", "quarantine"):
                (root / name).mkdir(mode=0o700, exist_ok=True)
            _sync_directory(root)
        self.index = Index(root / "index.sqlite")
        if not self.index.complete:
            self.rebuild_index()

    def stamp(self, key: str) -> str | None:
        """A text that changes whenever the object's file does.

        None when there is no such file; a row that claims otherwise is dropped.
        """
        stamp = self._look(key)
        if stamp is None:
            self._forget(key)
        return stamp

    def read(self, key: str) -> tuple[CanonicalRecord | PatchRecord, Stamped] | None:
        """The object ``key``, verified to the last byte, with its row and stamp.

        A damaged file goes to ``quarantine/`` and `CorruptChunk` is raised. None if there is none.
        """
        path = self._path(key)
        with self._translated("read"):
            try:
                with open(path, "rb") as file:
                    stamp = _stamp(os.fstat(file.fileno()))
                    data = file.read()
            except FileNotFoundError:
                self._forget(key)
                return None
        with self._quarantining(key, stamp):
            record = self.codec.decode(data, key, str(path))
            info = self.codec.read_info(io.BytesIO(data), len(data), key, str(path))
        self._repair(info, stamp)
        return record, (info, stamp)

    def info(self, key: str) -> ObjectInfo | None:
        """What ``key`` is: from its row, or from its file's header if the row is of another."""
        stamp = self.stamp(key)
        if stamp is None:
            return None
        row = self.index.get(key)
        if row is not None and row[1] == stamp:
            return row[0]
        with self._quarantining(key, stamp):
            fresh = self._peek(self._path(key))
        if fresh is None:
            return None
        self._repair(*fresh)
        return fresh[0]

    def write(self, record: CanonicalRecord | PatchRecord) -> Stamped:
        """Store ``record``, in place of the object under its key; its row and stamp.

        When this returns, the object survives a loss of power. Whatever interrupts it, the old
        object is there or the new one.
        """
        key = self.codec.name(record.key)
        path = self._path(key)
        created = round(time.time(), 3)
        data = self.codec.encode(record, created)
        info = self.codec.describe(record, created, len(data))
        aside = self.root / "tmp" / f"{key}.{os.getpid()}.{secrets.token_hex(8)}"
        with self._translated("write"):
            try:
                stamp = _write_synced(aside, data)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                _sync_directory(path.parent.parent)  # whoever made the folder may have died since
                with self.index.writing():
                    os.replace(aside, path)
                    self.index.put(info, stamp)
                _sync_directory(path.parent)
            finally:
                aside.unlink(missing_ok=True)
        return info, stamp

    def delete(self, key: str) -> bool:
        """Remove the object ``key``; whether there was one."""
        path = self._path(key)
        with self._translated("delete"):
            with self.index.writing():
                existed = path.exists()
                path.unlink(missing_ok=True)
                self.index.drop(key)
            if existed:
                _sync_directory(path.parent)
        return existed

    def verify(self) -> VerifyReport:
        """Read every object once; damaged ones go to quarantine."""
        ok = 0
        quarantined: list[str] = []
        refused: list[str] = []
        for path in self._files():
            try:
                ok += self.read(path.stem) is not None
            except CorruptChunk as error:
                quarantined.append(str(error))
            except StoreVersionError as error:
                refused.append(str(error))
        return VerifyReport(ok, tuple(quarantined), tuple(refused))

    def rebuild_index(self) -> int:
        """Make the rows anew from the files' headers; how many there are."""

        def headers() -> Iterator[Stamped]:
            for path in self._files():
                try:
                    found = self._peek(path)
                except (CorruptChunk, StoreVersionError) as error:
                    # it stays where it is: reading it by key tells what is wrong with it
                    logger.warning("not indexed: %s", error)
                    continue
                if found is not None:
                    yield found

        return self.index.rebuild(headers())

    def close(self) -> None:
        """Close the index; the objects are already safe."""
        self.index.close()

    def _claim(self) -> None:
        """Check the directory's format version, or make an empty or absent one a store."""
        marker = self.root / MARKER
        try:
            version = json.loads(marker.read_bytes())["format"]
        except FileNotFoundError:
            others = self.root.iterdir() if self.root.exists() else ()
            if any(not path.name.startswith(".kamera") for path in others):
                raise StoreError(
                    f"{self.root} is not empty and no kamera store (no {MARKER}): "
                    "give an empty or new directory"
                ) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"{marker} is damaged ({error}); restore it: {_MARKER_TEXT}") from error
        else:
            if type(version) is not int or version < 1:
                raise StoreError(f"{marker} is damaged ({version!r}); restore it: {_MARKER_TEXT}")
            if version > DIRECTORY_VERSION:
                raise StoreVersionError(
                    f"{self.root} is a store of format {version}, this version reads up to "
                    f"{DIRECTORY_VERSION}; upgrade kamera to open it"
                )
            return
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # the marker comes first, so that a store half made is never taken for a stranger's folder
        aside = self.root / f".kamera.{os.getpid()}.{secrets.token_hex(8)}"
        try:
            _write_synced(aside, _MARKER_TEXT.encode())
            os.replace(aside, marker)
            _sync_directory(self.root.parent)
        finally:
            aside.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        assert is_key(key), key
        return self.root / "objects" / key[:2] / f"{key}.safetensors"

    def _files(self) -> Iterator[Path]:
        """Object files; anything else that lies there is not ours to judge."""
        for path in sorted(self.root.glob("objects/??/*.safetensors")):
            if is_key(path.stem) and path.stem.startswith(path.parent.name):
                yield path

    def _peek(self, path: Path) -> Stamped | None:
        """Row of a file from its header, unverified but for the key."""
        with self._translated("read"):
            try:
                with open(path, "rb") as file:
                    status = os.fstat(file.fileno())
                    info = self.codec.read_info(file, status.st_size, path.stem, str(path))
            except FileNotFoundError:
                return None
        return info, _stamp(status)

    def _look(self, key: str) -> str | None:
        with self._translated("read"):
            try:
                return _stamp(os.stat(self._path(key)))
            except FileNotFoundError:
                return None

    # Both look twice: at the row without holding the index, as nearly always there is nothing to
    # do; and at the file while holding it, as another writer may just have brought a newer one.

    def _repair(self, info: ObjectInfo, stamp: str) -> None:
        row = self.index.get(info.key)
        if row is None or row[1] != stamp:
            with self.index.writing():
                if self._look(info.key) == stamp:
                    self.index.put(info, stamp)

    def _forget(self, key: str) -> None:
        if self.index.get(key) is not None:
            with self.index.writing():
                if self._look(key) is None:
                    self.index.drop(key)

    @contextlib.contextmanager
    def _quarantining(self, key: str, stamp: str) -> Iterator[None]:
        """On `CorruptChunk`, set the damaged file aside and say where it went."""
        try:
            yield
        except CorruptChunk as error:
            place = self.root / "quarantine" / f"{key}.{time.time_ns()}.safetensors"
            with self._translated("quarantine"), self.index.writing():
                if self._look(key) != stamp:  # no longer the file that was read
                    raise
                os.replace(self._path(key), place)
                self.index.drop(key)
            logger.warning("damaged object %s moved to %s", key, place)
            raise CorruptChunk(f"{error}; moved to {place}") from error

    @contextlib.contextmanager
    def _translated(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"store {self.root}: cannot {verb}: {error}") from error


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def _write_synced(path: Path, data: bytes) -> str:
    """Write a new file that only its owner may read, down to the disk; its stamp."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return _stamp(os.fstat(file.fileno()))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
