"""Locks of whole files and folders (`flock`): between threads as well as processes, and never for ever."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kamera.store import forks

PATIENCE = 60.0
"""Seconds a lock is waited for."""

_LONGEST_PAUSE = 0.02  # seconds between two tries


@contextlib.contextmanager
def locked(opened: Callable[[], int], where: Path, seconds: float = PATIENCE) -> Iterator[None]:
    """Hold the lock of what ``opened`` opens inside; its descriptor is closed afterwards.

    A forked child closes its copy. Raises `TimeoutError`, which names the process that holds the lock,
    after ``seconds``; `OSError`.
    """
    descriptor = forks.lockable(opened, int)
    try:
        deadline, pause = time.monotonic() + seconds, 0.0005
        while not taken(descriptor):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{where} has been locked for {seconds:g} s by {holder(descriptor)}: end that"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        try:
            yield
        finally:
            # in words: a child that was forked by other means than os.fork holds the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        forks.unlockable(descriptor)


def folder_locked(folder: Path, seconds: float = PATIENCE) -> contextlib.AbstractContextManager[None]:
    """`locked` of the folder at a path: it needs no file of its own, so no room."""
    return locked(lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), folder, seconds)


def taken(descriptor: int) -> bool:
    """Lock a descriptor; whether it could be had at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(descriptor: int) -> str:
    """Who holds the lock on what ``descriptor`` is of, in words, as far as the system tells."""
    inode = str(os.fstat(descriptor).st_ino)
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as table:
        for line in table:
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 00:2d:1234 0 EOF
            if "FLOCK" in fields[1:2] and fields[-3].rpartition(":")[2] == inode and "->" not in fields:
                return f"process {fields[-4]}"
    return "another process"
