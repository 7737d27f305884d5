"""Locks of whole files and folders (`flock`): no child keeps one, and no wait is for ever."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kamera.errors import StoreError
from kamera.store import forks

PATIENCE = 60.0
"""Seconds a lock is waited for."""

_LONGEST_PAUSE = 0.05


@contextlib.contextmanager
def locked_folder(path: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the folder at ``path`` against other threads and processes.

    Raises `StoreError`, which names the process that holds it, after ``patience`` seconds; `OSError`.
    """
    descriptor = forks.lockable(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), int)
    try:
        deadline, pause = time.monotonic() + patience, 0.001
        while not taken(descriptor):
            if time.monotonic() >= deadline:
                raise StoreError(
                    f"{path} has been locked for {patience:g} s by {holder(descriptor)}: end that"
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
