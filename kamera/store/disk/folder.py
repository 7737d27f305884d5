"""A folder of a store, held open: whatever is done below it goes by descriptor and follows no link."""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

_READ = os.O_RDONLY | os.O_CLOEXEC
_DIRECTORY = _READ | os.O_DIRECTORY
# without O_NONBLOCK a pipe in the place of an object would be waited on for ever
_FILE = _READ | os.O_NOFOLLOW | os.O_NONBLOCK


class NotAFile(OSError):
    """A link, a folder, a pipe, … stands where a store keeps a file."""


class Folder:
    """One folder; ``path`` is for messages only. Every name is one component, made by the store.

    Raises `OSError`, `NotAFile` among them, as the calls below it do.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def at(cls, path: Path) -> Folder:
        """The folder at ``path``, which may be reached through links: it is the caller's choice."""
        return cls(path, os.open(path, _DIRECTORY))

    def sub(self, name: str, *, make: bool = False) -> Folder:
        """The folder ``name`` in this one; ``make``: for its owner alone, if it is not there."""
        path = self.path / name
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._descriptor)
        try:
            return Folder(path, os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=self._descriptor))
        except NotADirectoryError:
            raise NotADirectoryError(
                f"{path} is a link or no folder, and a store follows no links: remove it"
            ) from None

    def status(self, name: str) -> os.stat_result | None:
        """Of whatever is called ``name``, a link included; None if nothing is."""
        try:
            return os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def refuse_links(self) -> None:
        """Raise `NotAFile` if there is a link in this folder."""
        for name in self.names():
            status = self.status(name)
            if status is not None and stat.S_ISLNK(status.st_mode):
                raise NotAFile(f"{self.path / name} is a link, and a store follows no links: remove it")

    def open(self, name: str) -> int:
        """Descriptor of a regular file, to be closed. `FileNotFoundError` if there is none."""
        status = self.status(name)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise NotAFile(f"{self.path / name} is a link or no file, and a store follows no links")
        return os.open(name, _FILE, dir_fd=self._descriptor)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """Descriptor and status of a regular file. `FileNotFoundError` if there is none."""
        descriptor = self.open(name)
        try:
            yield descriptor, os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def read(self, name: str) -> tuple[bytes, os.stat_result]:
        """All bytes of a file, and the status of that very file."""
        with self.reading(name) as (descriptor, status):
            parts: list[bytes] = []
            left = status.st_size
            while left > 0 and (part := os.read(descriptor, left)):
                parts.append(part)
                left -= len(part)
        return (parts[0] if len(parts) == 1 else b"".join(parts)), status

    def create(self, name: str, data: bytes, *, sync: bool = True) -> os.stat_result:
        """A new file that only its owner may read, by default down to the disk."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self._descriptor)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(descriptor, left) :]
            if sync:
                os.fsync(descriptor)
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def lockable(self, name: str) -> tuple[int, bool]:
        """Descriptor of an empty file to lock, and whether it was made now."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            with contextlib.suppress(FileExistsError):
                made = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._descriptor)
                return made, True
            with contextlib.suppress(FileNotFoundError):
                return os.open(name, flags, dir_fd=self._descriptor), False

    def move(self, name: str, target: Folder, new: str) -> None:
        """Give a file another name, in place of what is called so."""
        os.replace(name, new, src_dir_fd=self._descriptor, dst_dir_fd=target._descriptor)

    def remove(self, name: str) -> bool:
        """Delete a file or link; whether there was one."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
        except FileNotFoundError:
            return False
        return True

    def names(self) -> list[str]:
        """What lies in it, sorted."""
        # a descriptor of its own: listing moves its position, which other threads would share
        descriptor = os.open(".", _DIRECTORY, dir_fd=self._descriptor)
        try:
            return sorted(os.listdir(descriptor))
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Bring its names down to the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of the descriptor; may be called again."""
        self._close()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def stamp_of(status: os.stat_result) -> str:
    """A text that changes whenever a file is replaced or written to."""
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"
