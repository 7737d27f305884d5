"""The objects' files: ``objects/ab/ab….safetensors``, each named by its object."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from kamera.errors import CorruptChunk, StoreVersionError, WrongKey
from kamera.store.codec import Codec
from kamera.store.disk.claims import LOCK
from kamera.store.disk.folder import Folder, Nested, NotAFile, stamp_of
from kamera.store.disk.rows import Stamped
from kamera.store.fields import Header
from kamera.store.head import info_of
from kamera.store.keys import is_key
from kamera.store.sources import FileSource

logger = logging.getLogger(__name__)

LEFT_IN_PLACE = (StoreVersionError, WrongKey)
"""Refusals that do not mean damage: a reader with the right version or key still finds the object."""

_SUFFIX = ".safetensors"
_SHARD = re.compile(r"[0-9a-f]{2}")


class ObjectFiles:
    """Reads and moves files; knows nothing of rows. Raises `OSError`.

    Raises `ValueError` for a key that is not 64 lower-case hex digits, so no path is ever built from
    anything else.
    """

    def __init__(self, folder: Nested, tmp: Nested, codec: Codec) -> None:
        self._objects = folder
        self._tmp = tmp
        self._codec = codec
        self._durable: set[str] = set()  # folders whose names are known to be on the disk

    def path(self, key: str) -> Path:
        """The path of ``key``, for messages."""
        return self._objects.path / key[:2] / f"{key}{_SUFFIX}"

    def names(self) -> list[str]:
        """Names of all objects; any other file there is ignored."""
        found = []
        for name in self._shards():
            with self._folder.sub(name) as shard:
                found += [key for file in shard.names() if (key := _key_of(file, name)) is not None]
        return found

    def claimed(self) -> list[str]:
        """Names of the objects that somebody writes, or died writing."""
        tmp = self._tmp.there()
        return [] if tmp is None else [name[: -len(LOCK)] for name in tmp.names() if name.endswith(LOCK)]

    def row(self, key: str) -> Stamped | None:
        """`peek`, or None for a file that cannot be read."""
        try:
            return self.peek(key)
        except (CorruptChunk, *LEFT_IN_PLACE) as error:
            # it stays where it is: reading it by key reports the fault
            logger.warning("not indexed: %s", error)
            return None

    def stamp(self, key: str) -> str | None:
        """Stamp of the entry at the path of ``key``; None if there is none."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            status = shard.status(key + _SUFFIX)
            return None if status is None else stamp_of(status)
        return None

    def glance(self, key: str) -> str | None:
        """`stamp` with fewer calls, for rows: it follows a link in the place of the folder; no read does."""
        folder = self._objects.there()
        status = None if folder is None else folder.status(f"{key[:2]}/{key}{_SUFFIX}")
        return None if status is None else stamp_of(status)

    def load(self, key: str) -> tuple[bytes, str] | None:
        """All bytes of ``key``, unverified, and their stamp. `NotAFile` if it cannot be an object."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            data, status = shard.read(key + _SUFFIX)
            return data, stamp_of(status)
        return None

    def peek(self, key: str) -> Stamped | None:
        """The row of ``key`` by its `header`."""
        found = self.header(key)
        if found is None:
            return None
        header, status = found
        return replace(info_of(header, status.st_size), key=key), stamp_of(status)

    def header(self, key: str) -> tuple[Header, os.stat_result] | None:
        """The header of ``key``, its tensors unverified, and the status of its file. Raises as the codec."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            try:
                with (
                    shard.reading(key + _SUFFIX) as (descriptor, status),
                    open(descriptor, "rb", closefd=False) as file,
                ):
                    path = str(self.path(key))
                    return self._codec.read_header(file, status.st_size, key, path), status
            except NotAFile as error:
                raise CorruptChunk(str(error)) from error
        return None

    def open(self, key: str) -> FileSource | None:
        """``key``'s file, to be closed. `NotAFile` as `load`."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            return FileSource(shard.open(key + _SUFFIX))
        return None

    def prepare(self, key: str) -> Folder:
        """The folder of ``key``, made if absent; the caller closes it."""
        return self._shard(key, make=True)

    def sync_shards(self, shards: Collection[str], *, synced: bool = False) -> None:
        """Sync the names of these folders, unless known to be on the disk; ``synced``: now they are."""
        if not self._durable.issuperset(shards):  # a folder's maker may have died since
            if not synced:
                self._folder.sync()
            self._durable.update(shards)

    def shard(self, key: str) -> Folder | None:
        """The folder of ``key``, which the caller closes; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return self._shard(key)
        return None

    def bring(self, source: Folder, name: str, shard: Folder, key: str) -> None:
        """Put a file in the place of ``key``."""
        source.move(name, shard, key + _SUFFIX)

    def take(self, shard: Folder, key: str, target: Folder, name: str) -> None:
        """Move the entry at the path of ``key`` out, of any type."""
        shard.move(key + _SUFFIX, target, name)

    def remove(self, shard: Folder, key: str) -> bool:
        """Delete the file of ``key``; return True if it existed."""
        return shard.remove(key + _SUFFIX)

    def sync(self, key: str) -> None:
        """Sync the name of ``key``, or its absence, to the disk."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            self._folder.sync()
            shard.sync()

    @property
    def _folder(self) -> Folder:
        """The folder of objects. Raises `FileNotFoundError` if there is none."""
        folder = self._objects.there()
        if folder is None:
            raise FileNotFoundError(f"{self._objects.path} is not there")
        return folder

    def _shards(self) -> list[str]:
        folder = self._objects.there()
        return [] if folder is None else [name for name in folder.names() if _SHARD.fullmatch(name)]

    def _shard(self, key: str, *, make: bool = False) -> Folder:
        if not is_key(key):
            raise ValueError(f"{key!r} is no object's name: 64 lower-case hex digits")
        return (self._objects.made() if make else self._folder).sub(key[:2], make=make)


def _key_of(file: str, shard: str) -> str | None:
    """The key of an object's file in a folder; None for any other file."""
    key = file.removesuffix(_SUFFIX)
    return key if file.endswith(_SUFFIX) and is_key(key) and key.startswith(shard) else None
