"""Claims: one writer at a time for each object, and a trace of a writer that died.

A claim is a locked file in ``tmp/``. The system frees the lock when the process ends, in any way;
the file stays, and tells the next writer to correct the object's row.
"""

from __future__ import annotations

import fcntl
import os
import time

from kamera import forks
from kamera.store.disk.folder import Folder
from kamera.store.disk.locks import holder, taken

LOCK = ".lock"
"""Suffix of a claim's file, after the object's name."""

_LONGEST_PAUSE = 0.05  # seconds between two tries


class Claim:
    """The right to write one object; ``interrupted`` if its former holder never released it."""

    def __init__(self, folder: Folder, file: str, descriptor: int, interrupted: bool) -> None:
        self.interrupted = interrupted
        self._folder = folder
        self._file = file
        self._descriptor = descriptor

    def settle(self) -> None:
        """Note, before `close`, that the object and its row agree and need no repair."""
        self._folder.remove(self._file)

    def close(self) -> None:
        """Release the claim."""
        try:
            # explicitly: a child that was not forked by os.fork holds the descriptor too
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            forks.unlockable(self._descriptor)


def claimant(folder: Folder, name: str) -> str:
    """The holder of the claim on the object ``name``, as text. Raises `OSError`."""
    try:
        with folder.reading(f"{name}{LOCK}") as (descriptor, _):
            return holder(descriptor)
    except FileNotFoundError:
        return "somebody who has just let go of it"


def claim(folder: Folder, name: str, seconds: float) -> Claim | None:
    """Claim the object ``name``; None if another has it for longer than ``seconds``.

    Excludes threads as well as processes, and the same thread twice. Raises `OSError`.
    """
    file = f"{name}{LOCK}"
    deadline = time.monotonic() + seconds
    pause = 0.001
    while True:
        descriptor, made = forks.lockable(lambda: folder.lockable(file), lambda opened: opened[0])
        try:
            if not taken(descriptor):
                if time.monotonic() >= deadline:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            mine, there = os.fstat(descriptor), folder.status(file)
            if there is not None and (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                held, descriptor = descriptor, -1
                return Claim(folder, file, held, interrupted=not made)
            # else the former holder is done, and removed its file while this one waited
        finally:
            if descriptor >= 0:
                forks.unlockable(descriptor)
