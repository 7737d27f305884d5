"""A file that appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

ASIDE = ".kamera."
"""Prefix of the name of a file that is being written."""


@contextlib.contextmanager
def published(path: Path) -> Iterator[BinaryIO]:
    """A new file, in place of any other at ``path`` once it is complete and on the disk. Raises `OSError`.

    Only its owner may read it. Until then it has no name, if the system supports that: a killed writer leaves
    nothing behind.
    """
    aside = f"{ASIDE}{os.getpid()}.{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        stack.callback(_remove, aside, folder)
        descriptor, named = _without_name(path.parent), False
        if descriptor is None:
            flags, named = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, True
            descriptor = os.open(aside, flags, 0o600, dir_fd=folder)
        with open(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not named:  # linkat follows the link only if it is given a folder
                os.link(f"/proc/self/fd/{file.fileno()}", aside, dst_dir_fd=folder, follow_symlinks=True)
        os.replace(aside, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)


def _without_name(folder: Path) -> int | None:
    """Descriptor of a new file without a name; None if the system does not support that."""
    if not hasattr(os, "O_TMPFILE") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return None
        raise


def _remove(name: str, folder: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
