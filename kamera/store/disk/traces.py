"""Traces of writers: which objects somebody writes, or died writing.

A writer has one locked file in ``tmp/``, which names its objects. The system frees the lock when the process
ends, in any way; the file stays. It tells listings which rows to correct, and the next writer what to clear
up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Sequence

from kamera import forks
from kamera.files import try_lock
from kamera.store.disk.folder import Folder, NotAFile

LOCK, PART = ".lock", ".part"
"""Suffixes of the file that names the objects, and of one that is not whole yet."""

_NAME = re.compile(r"[0-9a-f]{64}")


class Trace:
    """The locked file of one writer; ``names`` are those of its objects."""

    def __init__(self, folder: Folder, token: str, descriptor: int, names: Sequence[str]) -> None:
        self.names = names
        self._folder = folder
        self._token = token
        self._descriptor = descriptor

    @classmethod
    def begin(cls, folder: Folder, names: Sequence[str]) -> Trace:
        """That of a new writer. Raises `OSError`."""
        while True:
            token = secrets.token_hex(8)
            try:
                folder.create(token + LOCK, "\n".join(names).encode(), sync=False)
            except BaseException:
                folder.remove(token + LOCK)
                raise
            descriptor = _lock(folder, token + LOCK)
            if descriptor is not None:  # else another cleared it up before it was locked
                return cls(folder, token, descriptor, names)

    @classmethod
    def take_over(cls, folder: Folder, file: str) -> Trace | None:
        """That of a dead writer, now this one's; None for one that lives, and for what is no trace."""
        descriptor = _lock(folder, file)
        if descriptor is None:
            return None
        return cls(folder, file[: -len(LOCK)], descriptor, names_in_trace(folder, file))

    def part(self, name: str) -> str:
        """The file in which the object ``name`` is written."""
        return f"{name}.{self._token}{PART}"

    def settle(self) -> None:
        """Note that objects and rows agree, and need no repair; no part is left."""
        self._folder.remove(self._token + LOCK)

    def close(self) -> None:
        """Release the lock."""
        try:
            # explicitly: a child that was not forked by os.fork holds the descriptor too
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            forks.close_lockable(self._descriptor)


def names_in_trace(folder: Folder, file: str) -> list[str]:
    """The objects of the trace ``file``; none if it is gone or is no file."""
    with contextlib.suppress(OSError):
        return _NAME.findall(folder.read(file)[0].decode("ascii", "replace"))
    return []


def _lock(folder: Folder, file: str) -> int | None:
    """Descriptor of a file, locked; None if somebody else has the lock, or it is gone or no file."""
    with contextlib.suppress(FileNotFoundError, NotAFile), forks.open_lockable() as descriptors:
        descriptor = folder.open(file)
        descriptors.add(descriptor)
        mine = False
        try:
            mine = try_lock(descriptor) and os.fstat(descriptor).st_nlink > 0
        finally:
            if not mine:
                forks.close_lockable(descriptor)
        return descriptor if mine else None
    return None
