"""The folder of damaged objects: never served, deleted only on request, each with the reason beside it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import time
from pathlib import Path

from kamera.errors import CorruptChunk, StoreVersionError, WrongKey
from kamera.store.codec import Codec
from kamera.store.disk.folder import Folder, Nested, NotAFile
from kamera.store.info import ObjectInfo, Quarantined

logger = logging.getLogger(__name__)

_COPY = re.compile(r"([0-9a-f]{64})\.(\d{1,20})\.safetensors")
_REASON = re.compile(r"([0-9a-f]{64}\.\d{1,20})\.json")


class Quarantine:
    """Copies called ``NAME.TIME.safetensors`` (time in ns) with ``NAME.TIME.json`` beside them."""

    def __init__(self, folder: Nested) -> None:
        self._place = folder

    def take(self, objects: Folder, file: str, name: str, reason: str) -> Path:
        """Move the damaged object ``name`` out of its folder, of any type; return its new path."""
        folder = self._place.made()
        copy = f"{name}.{time.time_ns()}"
        text = json.dumps({"reason": reason}).encode()
        try:
            folder.create(f"{copy}.json", text, sync=False)
        except OSError as error:  # a full disk must not keep a damaged file in its place
            logger.warning("no reason written for %s: %s", copy, error)
        objects.move(file, folder, f"{copy}.safetensors")
        return folder.path / f"{copy}.safetensors"

    def copies(self) -> list[Quarantined]:
        """The copies here, by name and time."""
        found = []
        for file, status in self._statuses().items():
            match = _COPY.fullmatch(file)
            if match is None:
                continue
            name, nanoseconds = match.groups()
            held = status.st_size if stat.S_ISREG(status.st_mode) else 0
            found.append(Quarantined(file, name, held, int(nanoseconds) / 1e9, self._reason(file)))
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
            folder.remove(_reason_of(file))
            folder.sync()

    def collect(self, before: float) -> int:
        """Delete reasons older than ``before`` (seconds since 1970) without a copy; return their number."""
        found = self._statuses()
        removed = 0
        for file, status in found.items():
            match = _REASON.fullmatch(file)
            if match and f"{match.group(1)}.safetensors" not in found and status.st_mtime < before:
                removed += self._place.made().remove(file)
        return removed

    def _statuses(self) -> dict[str, os.stat_result]:
        folder = self._place.there()
        return {} if folder is None else folder.statuses()

    def _reason(self, file: str) -> str:
        with contextlib.suppress(FileNotFoundError, NotAFile, ValueError, KeyError, TypeError):
            return str(json.loads(self._place.made().read(_reason_of(file))[0])["reason"])
        return "not recorded"


def described(folder: Folder, file: str, codec: Codec) -> ObjectInfo | None:
    """The object in a file whose name begins with its own, by its header; None if it cannot be read."""
    try:
        with folder.reading(file) as (descriptor, status), open(descriptor, "rb", closefd=False) as opened:
            return codec.read_info(opened, status.st_size, file.partition(".")[0], file)
    except (CorruptChunk, StoreVersionError, WrongKey, FileNotFoundError, NotAFile):
        return None


def _reason_of(copy: str) -> str:
    return copy.removesuffix(".safetensors") + ".json"
