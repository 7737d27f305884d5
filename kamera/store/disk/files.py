"""The objects' files: ``objects/….safetensors``, each named by its object."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from pathlib import Path

from kamera.errors import CorruptChunk
from kamera.store.codec import UNREADABLE, Codec
from kamera.store.disk.folder import Nested, NotAFile, stamp_of
from kamera.store.disk.rows import Stamped
from kamera.store.disk.traces import LOCK, names_in_trace
from kamera.store.fields import Header
from kamera.store.head import info_of
from kamera.store.keys import is_key
from kamera.store.sources import FileSource

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"


class ObjectFiles:
    """The files as they are read; knows nothing of rows. Raises `OSError`."""

    def __init__(self, objects: Nested, tmp: Nested, codec: Codec) -> None:
        self._objects = objects
        self._tmp = tmp
        self._codec = codec

    def path(self, key: str) -> Path:
        """The path of ``key``, for messages."""
        return self._objects.path / file_of(key)

    def names(self) -> list[str]:
        """Names of all objects; any other file there is ignored."""
        folder = self._objects.existing_folder()
        names = [] if folder is None else folder.names()
        keys = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        return [key for key in keys if is_key(key)]

    def names_in_traces(self) -> set[str]:
        """Names of the objects that somebody writes, or died writing."""
        tmp = self._tmp.existing_folder()
        files = [] if tmp is None else [file for file in tmp.names() if file.endswith(LOCK)]
        return {name for file in files if tmp is not None for name in names_in_trace(tmp, file)}

    def row(self, key: str) -> Stamped | None:
        """`peek`, or None for a file that cannot be read."""
        try:
            return self.peek(key)
        except UNREADABLE as error:
            # it stays where it is: reading it by key reports the fault
            logger.warning("not indexed: %s", error)
            return None

    def stamp(self, key: str) -> str | None:
        """Stamp of the entry at the path of ``key``; None if there is none."""
        folder, file = self._objects.existing_folder(), file_of(key)
        status = None if folder is None else folder.status(file)
        return None if status is None else stamp_of(status)

    def peek(self, key: str) -> Stamped | None:
        """The row of ``key`` by its `header`."""
        header_and_status = self.header(key)
        if header_and_status is None:
            return None
        header, status = header_and_status
        return replace(info_of(header, status.st_size), key=key), stamp_of(status)

    def header(self, key: str) -> tuple[Header, os.stat_result] | None:
        """The header of ``key``, its tensors unverified, and the status of its file. Raises as the codec."""
        try:
            file = self.open(key)
        except NotAFile as error:
            raise CorruptChunk(str(error)) from error
        if file is None:
            return None
        with contextlib.closing(file):
            return self._codec.read_header(file, key, str(self.path(key))), file.status

    def open(self, key: str) -> FileSource | None:
        """``key``'s file, to be closed; None if there is none. `NotAFile` if it cannot be an object."""
        folder, file = self._objects.existing_folder(), file_of(key)
        with contextlib.suppress(FileNotFoundError):
            return None if folder is None else FileSource(folder.open(file))
        return None


def file_of(key: str) -> str:
    """The name of an object's file. Raises `ValueError` for what is no key: no path is built from it."""
    if not is_key(key):
        raise ValueError(f"{key!r} is no object's name: 64 lower-case hex digits")
    return key + _SUFFIX
