"""The objects' files: ``objects/ab/ab….safetensors``, each named by its object."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from kamera.errors import CorruptChunk
from kamera.store.codec import Codec
from kamera.store.disk.folder import Folder, NotAFile, stamp_of
from kamera.store.disk.index import Stamped
from kamera.store.keys import is_key
from kamera.store.sources import FileSource

_SUFFIX = ".safetensors"
_SHARD = re.compile(r"[0-9a-f]{2}")


class ObjectFiles:
    """Reads and moves files; knows nothing of rows. Raises `OSError`.

    A key that is no name of 64 lower-case hex digits is a `ValueError`, so no path is ever built from
    anything else.
    """

    def __init__(self, folder: Folder, codec: Codec) -> None:
        self._folder = folder
        self._codec = codec
        self._durable: set[str] = set()  # folders whose names are known to be on the disk

    def path(self, key: str) -> Path:
        """Where ``key`` lies, for messages."""
        return self._folder.path / key[:2] / f"{key}{_SUFFIX}"

    def names(self) -> list[str]:
        """Of all objects; anything else that lies there is not ours to judge."""
        found = []
        for name in self._folder.names():
            if _SHARD.fullmatch(name):
                with self._folder.sub(name) as shard:
                    files = [file.removesuffix(_SUFFIX) for file in shard.names() if file.endswith(_SUFFIX)]
                found += [key for key in files if is_key(key) and key.startswith(name)]
        return found

    def stamp(self, key: str) -> str | None:
        """Stamp of whatever stands in the place of ``key``; None if nothing does."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            status = shard.status(key + _SUFFIX)
            return None if status is None else stamp_of(status)
        return None

    def load(self, key: str) -> tuple[bytes, str] | None:
        """All bytes of ``key``, unverified, and their stamp. `NotAFile` for what cannot be an object."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            data, status = shard.read(key + _SUFFIX)
            return data, stamp_of(status)
        return None

    def peek(self, key: str) -> Stamped | None:
        """The row of ``key`` from its header, unverified but for the key. Raises as the codec."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            try:
                with shard.reading(key + _SUFFIX) as (descriptor, status):
                    with open(descriptor, "rb", closefd=False) as file:
                        info = self._codec.read_info(file, status.st_size, key, str(self.path(key)))
                    return info, stamp_of(status)
            except NotAFile as error:
                raise CorruptChunk(str(error)) from error
        return None

    def open(self, key: str) -> FileSource | None:
        """``key``'s file, to be closed. `NotAFile` as `load`."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            return FileSource(shard.open(key + _SUFFIX))
        return None

    def prepare(self, key: str) -> Folder:
        """The folder ``key`` belongs in, made and on the disk; to be closed."""
        shard = self._shard(key, make=True)
        if key[:2] not in self._durable:  # whoever made it may have died since
            self._folder.sync()
            self._durable.add(key[:2])
        return shard

    def bring(self, source: Folder, name: str, shard: Folder, key: str) -> None:
        """Put a file in the place of ``key``."""
        source.move(name, shard, key + _SUFFIX)

    def take(self, key: str, target: Folder, name: str) -> bool:
        """Move ``key`` out, whatever stands there; whether anything did."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            shard.move(key + _SUFFIX, target, name)
            return True
        return False

    def sync(self, key: str) -> None:
        """Bring the name of ``key``, or its absence, down to the disk."""
        with contextlib.suppress(FileNotFoundError), self._shard(key) as shard:
            self._folder.sync()
            shard.sync()

    def _shard(self, key: str, *, make: bool = False) -> Folder:
        if not is_key(key):
            raise ValueError(f"{key!r} is no object's name: 64 lower-case hex digits")
        return self._folder.sub(key[:2], make=make)
