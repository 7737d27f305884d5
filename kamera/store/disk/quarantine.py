"""The folder of damaged objects: never served, deleted only on request."""

from __future__ import annotations

import re
import stat
import time
from pathlib import Path

from kamera.errors import CorruptChunk, StoreVersionError, WrongKey
from kamera.store.codec import Codec
from kamera.store.disk.folder import Folder, Nested, NotAFile
from kamera.store.info import ObjectInfo, Quarantined

_COPY = re.compile(r"([0-9a-f]{64})\.(\d{1,20})\.safetensors")


class Quarantine:
    """Copies called ``NAME.TIME.safetensors`` (time in ns)."""

    def __init__(self, folder: Nested) -> None:
        self._place = folder

    def take(self, objects: Folder, file: str, name: str) -> Path:
        """Move the damaged object ``name`` out of its folder, of any type; return its new path."""
        folder, copy = self._place.made(), f"{name}.{time.time_ns()}.safetensors"
        objects.move(file, folder, copy)
        return folder.path / copy

    def copies(self) -> list[Quarantined]:
        """The copies here, by name and time."""
        folder, found = self._place.there(), []
        for file, status in [] if folder is None else folder.statuses():
            match = _COPY.fullmatch(file)
            if match is not None:
                held = status.st_size if stat.S_ISREG(status.st_mode) else 0
                found.append(Quarantined(file, match.group(1), held, int(match.group(2)) / 1e9))
        return found

    def info(self, file: str, codec: Codec) -> ObjectInfo | None:
        """The description of a copy from its header; None if it cannot be read."""
        return described(self._place.made(), file, codec)

    def read(self, file: str) -> bytes:
        """The bytes of a copy. Raises `FileNotFoundError`, `NotAFile`."""
        return self._place.made().read(file)[0]

    def drop(self, file: str) -> None:
        """Delete a copy."""
        folder = self._place.there()
        if folder is not None and _COPY.fullmatch(file) and folder.remove(file):
            folder.sync()


def described(folder: Folder, file: str, codec: Codec) -> ObjectInfo | None:
    """The object in a file whose name begins with its own, by its header; None if it cannot be read."""
    try:
        with folder.reading(file) as (descriptor, status), open(descriptor, "rb", closefd=False) as opened:
            return codec.read_info(opened, status.st_size, file.partition(".")[0], file)
    except (CorruptChunk, StoreVersionError, WrongKey, FileNotFoundError, NotAFile):
        return None
