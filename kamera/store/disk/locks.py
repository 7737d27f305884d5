"""Locks of whole files and folders (`flock`): between threads and processes, with a time limit on waiting."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kamera import forks

PATIENCE = 60.0
"""Seconds to wait for a lock."""

_LONGEST_PAUSE = 0.02  # seconds between two tries


@contextlib.contextmanager
def locked(opened: Callable[[], int], where: Path, seconds: float = PATIENCE) -> Iterator[None]:
    """Hold the lock of the file that ``opened`` opens; its descriptor is closed afterwards.

    A forked child closes its copy. Raises `TimeoutError` after ``seconds``, which names the process that
    holds the lock, and `OSError`.
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
            # explicitly: a child that was not forked by os.fork holds the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        forks.unlockable(descriptor)


def folder_locked(folder: Path, seconds: float = PATIENCE) -> contextlib.AbstractContextManager[None]:
    """`locked` of the folder at a path: it needs no lock file, so no disk space."""
    return locked(lambda: os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), folder, seconds)


def taken(descriptor: int) -> bool:
    """Lock a descriptor without waiting; return True on success."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(descriptor: int) -> str:
    """The holder of the lock on the file of ``descriptor``, as text, as far as the system tells."""
    inode = str(os.fstat(descriptor).st_ino)
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as table:
        for line in table:
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 00:2d:1234 0 EOF
            if "FLOCK" in fields[1:2] and fields[-3].rpartition(":")[2] == inode and "->" not in fields:
                return f"process {fields[-4]}"
    return "another process"
