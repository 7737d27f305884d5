"""One sync of a whole file system, for many files that were written together.

A file's own sync costs a journal commit. ``syncfs`` costs one for all of them, and writes what other programs
left unwritten there, too. It is relied upon only where it is known to wait for the disk and to report the
disk's errors: on Linux from 5.8 on, on local file systems.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

_KNOWN = {
    0xEF53,  # ext2, ext3, ext4
    0x58465342,  # xfs
    0x9123683E,  # btrfs
    0xF2F52010,  # f2fs
    0x01021994,  # tmpfs
}
"""File systems, by the number that statfs(2) calls their type."""
_REPORTS = (5, 8)
"""The first Linux whose ``syncfs`` reports that a file could not be written."""


def syncs_all(descriptor: int) -> bool:
    """True if `sync_all` makes all that was written to the file system of ``descriptor`` durable."""
    return _type_of(descriptor) in _KNOWN and _kernel() >= _REPORTS


def sync_all(descriptor: int) -> None:
    """Sync the file system of ``descriptor``, opened before the first of the writes.

    Raises `OSError`, also for a write of another program that failed since it was opened.
    """
    if _syncfs(descriptor) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)} (syncfs)")


def _syncfs(descriptor: int) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syncfs(descriptor))


def _type_of(descriptor: int) -> int | None:
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return None
    buffer = ctypes.create_string_buffer(256)  # struct statfs, which begins with its type
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if hasattr(libc, "syncfs") and libc.fstatfs(descriptor, buffer) == 0:
            return int.from_bytes(buffer.raw[:8], sys.byteorder)
    return None


def _kernel() -> tuple[int, ...]:
    numbers = os.uname().release.split("-")[0].split(".")[:2]
    return tuple(int(n) for n in numbers) if all(n.isdigit() for n in numbers) else (0,)
