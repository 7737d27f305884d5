"""A folder of a store: all operations below it use descriptors and follow no link."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

from kamera import forks
from kamera.files import PATIENCE, lock_descriptor

_READ = os.O_RDONLY | os.O_CLOEXEC
_DIRECTORY = _READ | os.O_DIRECTORY
# without O_NONBLOCK, opening a pipe in the place of an object would block for ever
_FILE = _READ | os.O_NOFOLLOW | os.O_NONBLOCK


_HOLLOW = 64 * 2**20
"""Bytes of holes a file may have; or as many as its data, if that is more."""


class NotAFile(OSError):
    """The entry in a file's place is a link, a folder, a pipe, or a file that is mostly holes."""


class Folder:
    """One folder; ``path`` is for messages only. Every name is one component, made by the store.

    Raises `OSError`, `NotAFile` among them, as the calls below it do.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def at(cls, path: Path) -> Folder:
        """The folder at ``path``, which may contain links: the caller chose it."""
        return cls(path, os.open(path, _DIRECTORY))

    def sub(self, name: str, *, make: bool = False) -> Folder:
        """The folder ``name`` in this one; ``make``: create it if absent, accessible to its owner only."""
        path = self.path / name
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)
        return Folder(path, _open(path, self.descriptor))

    def status(self, name: str) -> os.stat_result | None:
        """Status of the entry ``name``, a link's own; None if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        return None

    def open(self, name: str) -> int:
        """Descriptor of a regular file, closed by the caller. Raises `FileNotFoundError` if there is none."""
        status = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            raise NotAFile(f"{self.path / name} is a link or no file, and a store follows no links")
        descriptor = os.open(name, _FILE, dir_fd=self.descriptor)
        try:
            _refuse_holes(self.path / name, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """Descriptor and status of a regular file. Raises `FileNotFoundError` if there is none."""
        descriptor = self.open(name)
        try:
            yield descriptor, os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def read(self, name: str) -> tuple[bytes, os.stat_result]:
        """All bytes of a file, and the status of the same file."""
        with self.reading(name) as (descriptor, status):
            parts: list[bytes] = []
            bytes_left = status.st_size
            while bytes_left > 0 and (part := os.read(descriptor, bytes_left)):
                parts.append(part)
                bytes_left -= len(part)
        return (parts[0] if len(parts) == 1 else b"".join(parts)), status

    def create(self, name: str, data: bytes, *, sync: bool = True) -> os.stat_result:
        """Create a file that only its owner may read; by default it is synced."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if sync:
                os.fsync(descriptor)
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def move(self, name: str, target: Folder, new: str) -> None:
        """Rename a file, replacing any entry of the new name."""
        os.replace(name, new, src_dir_fd=self.descriptor, dst_dir_fd=target.descriptor)

    def remove(self, name: str) -> bool:
        """Delete a file or link; return True if it existed."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)
            return True
        return False

    def names(self) -> list[str]:
        """Names of its entries, sorted."""
        # a separate descriptor: listing moves its position, which other threads would share
        descriptor = os.open(".", _DIRECTORY, dir_fd=self.descriptor)
        try:
            return sorted(os.listdir(descriptor))
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def locked(self, name: str, seconds: float = PATIENCE) -> Iterator[None]:
        """Hold the lock of a file that is never replaced. `TimeoutError` after ``seconds``."""
        with forks.open_lockable() as descriptors:
            descriptor = self.open(name)
            descriptors.add(descriptor)
        with lock_descriptor(descriptor, self.path / name, seconds):
            yield

    def statuses(self) -> list[tuple[str, os.stat_result]]:
        """Its entries with the status of each; a link's own."""
        return [(name, status) for name in self.names() if (status := self.status(name)) is not None]

    def sync(self) -> None:
        """Sync its names to the disk."""
        os.fsync(self.descriptor)

    def close(self) -> None:
        """Close the descriptor; may be called again."""
        self._close()

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path, parent: int) -> int:
    """Descriptor of the folder with the name of ``path`` in the one of ``parent``."""
    try:
        return os.open(path.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except NotADirectoryError:
        raise NotADirectoryError(
            f"{path} is a link or no folder, and a store follows no links: remove it"
        ) from None


def _refuse_holes(path: Path, descriptor: int) -> None:
    """Raise `NotAFile` for a file far larger than its data; blocks do not tell, they may be compressed."""
    size = os.fstat(descriptor).st_size
    if size <= _HOLLOW:
        return
    data_bytes = at = 0
    try:
        while at < size and data_bytes * 2 < size - _HOLLOW:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, start, os.SEEK_HOLE)
            data_bytes += at - start
    except OSError as error:
        if error.errno == errno.EINVAL:  # the file system does not report holes
            return
        if error.errno != errno.ENXIO:  # ENXIO: only a hole is left
            raise
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    if size - data_bytes > max(_HOLLOW, data_bytes):
        raise NotAFile(f"{path} is hollow: it claims {size} bytes and holds {data_bytes}")


class Nested:
    """The folder ``name`` of ``parent``, made when first needed: a full disk may have no room for it.

    It stays open as long as it is the one in its place, unless ``stays`` is False.
    """

    def __init__(self, parent: Folder, name: str, *, stays: bool = True) -> None:
        self.path = parent.path / name
        self._parent = parent
        self._stays = stays
        self._name = name
        self._folder: Folder | None = None

    def ensure(self) -> Folder:
        """The folder, its name on the disk. Raises as `Folder.sub`."""
        folder = self.existing_folder()
        if folder is None:
            folder = self._parent.sub(self._name, make=True)
            self._parent.sync()
        return folder

    def existing_folder(self) -> Folder | None:
        """The folder; None if there is none."""
        status, folder = self._parent.status(self._name), self._folder
        if status is None:
            return None
        if folder is None or not os.path.samestat(os.fstat(folder.descriptor), status):
            # the other is closed when the last thread that uses it lets go of it
            folder = self._parent.sub(self._name)
            self._folder = folder if self._stays else None
        return folder


def stamp_of(status: os.stat_result) -> str:
    """A text that changes whenever a file is replaced or written to."""
    return f"{status.st_ino}-{status.st_size}-{status.st_mtime_ns}"


def size_of(stamp: str) -> int:
    """The bytes of the file that a stamp is of."""
    return int(stamp.split("-")[1])
