"""Claims: one writer at a time for each object, and a trace of a writer that died.

A claim is a locked file in ``tmp/``. The system frees the lock when the process ends, in any way;
the file stays, and tells the next writer to correct the object's row. A writer of several objects locks one
file, which has a name for each of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time

from kamera import forks
from kamera.files import holder, taken
from kamera.store.disk.folder import Folder

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

    @property
    def file(self) -> tuple[int, int]:
        """Device and inode of the locked file."""
        status = os.fstat(self._descriptor)
        return status.st_dev, status.st_ino

    def covers(self, name: str) -> bool:
        """Claim the object ``name`` as well, under the same lock; False if somebody claims it."""
        return self._folder.link(self._file, f"{name}{LOCK}")

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


class Claims:
    """The right to write several objects: under one lock, and one more for each that another writer had."""

    def __init__(self, folder: Folder) -> None:
        self.interrupted: dict[str, bool] = {}
        """The objects claimed, each with whether its former holder never released it."""
        self._folder = folder
        self._held: list[Claim] = []

    def take(self, name: str, seconds: float) -> bool:
        """Claim the object ``name`` too; False if another has it for longer than ``seconds``.

        To be called in the order of the names, of all writers: so that no two wait for each other.
        """
        if self._held and self._held[0].covers(name):
            self.interrupted[name] = False
        elif self._is_mine(name):  # a dead writer's, that had several objects as well
            self.interrupted[name] = True
        else:
            mine = claim(self._folder, name, seconds)
            if mine is None:
                return False
            self._held.append(mine)
            self.interrupted[name] = mine.interrupted
        return True

    def settle(self, name: str) -> None:
        """`Claim.settle` for one of them."""
        self._folder.remove(f"{name}{LOCK}")

    def close(self) -> None:
        """Release them all."""
        with contextlib.ExitStack() as stack:
            for claim in self._held:
                stack.callback(claim.close)

    def _is_mine(self, name: str) -> bool:
        status = self._folder.status(f"{name}{LOCK}")
        return status is not None and (status.st_dev, status.st_ino) in {held.file for held in self._held}


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
        with forks.lockable() as opened:
            descriptor, made = folder.lockable(file)
            opened.add(descriptor)
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
