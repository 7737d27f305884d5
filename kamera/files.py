"""Folders without links, files that appear whole or not at all, and locks between threads and processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from platformdirs import user_cache_path

from kamera import forks

ASIDE = ".kamera."
"""Prefix of the name of a file that is being written."""

PATIENCE = 60.0
"""Seconds to wait for a lock."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags by which a folder is opened."""
# without O_NONBLOCK, opening a pipe in the place of a file would block for ever
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST_PAUSE = 0.02  # seconds between two tries


def cache_dir() -> Path:
    """Your cache folder, or a temporary one where that cannot be made."""
    try:
        return user_cache_path("kamera", appauthor=False, ensure_exists=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kamera-"))


def user_path(path: str | os.PathLike[str]) -> Path:
    """A path that a caller gave, from the root on, so that it stays when the working folder changes.

    ``~`` is the home. Raises ValueError for an empty path.
    """
    if not os.fspath(path):
        raise ValueError("'' is no path: give one")
    return Path(path).expanduser().absolute()


class NotAFile(OSError):
    """The entry in a file's place is a link, a folder or a pipe."""


class Folder:
    """One folder; ``path`` is for messages only. Every name is one component, and no link is followed.

    Raises `OSError`, `NotAFile` among them, as the calls below it do.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def at(cls, path: Path) -> Folder:
        """The folder at ``path``, which may contain links: the caller chose it."""
        return cls(path, os.open(path, FOLDER))

    def sub(self, name: str, *, make: bool = False) -> Folder:
        """The folder ``name`` in this one; ``make``: create it if absent, accessible to its owner only."""
        path = self.path / name
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)
        try:
            return Folder(path, os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=self.descriptor))
        except NotADirectoryError:
            raise NotADirectoryError(
                f"{path} is a link or no folder, and a store follows no links: remove it"
            ) from None

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
        return os.open(name, _FILE, dir_fd=self.descriptor)

    @contextlib.contextmanager
    def reading(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """Descriptor and status of a regular file. Raises `FileNotFoundError` if there is none."""
        descriptor = self.open(name)
        try:
            yield descriptor, os.fstat(descriptor)
        finally:
            with contextlib.suppress(OSError):  # an error here says nothing about the bytes read
                os.close(descriptor)

    def read(self, name: str) -> tuple[bytes, os.stat_result]:
        """All bytes of a file, and the status of the same file."""
        with self.reading(name) as (descriptor, status), open(descriptor, "rb", closefd=False) as file:
            return file.read(), status

    def create(self, name: str, parts: Iterable[bytes | memoryview]) -> os.stat_result:
        """Create a file of these bytes that only its owner may read, and sync it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
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
        descriptor = os.open(".", FOLDER, dir_fd=self.descriptor)
        try:
            return sorted(os.listdir(descriptor))
        finally:
            os.close(descriptor)

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


@contextlib.contextmanager
def publish_file(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A new file, in place of any other at ``path`` once it is complete and on the disk. Raises `OSError`.

    What a killed writer leaves behind is removed by the next one in its folder: a lock shows which writers
    are alive.
    """
    with Folder.at(path.parent) as folder, contextlib.ExitStack() as stack:
        for name in folder.names():
            if name.startswith(ASIDE):
                with contextlib.suppress(OSError), folder.reading(name) as (descriptor, _):
                    if try_lock(descriptor):
                        folder.remove(name)
        aside, descriptor = _claim(folder, mode)
        stack.callback(folder.remove, aside)
        with open(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            folder.move(aside, folder, path.name)
        folder.sync()


@contextlib.contextmanager
def lock_path(path: Path, seconds: float = PATIENCE, flags: int = FOLDER) -> Iterator[None]:
    """Hold the lock of the folder at ``path``, which takes no disk space; or of a file, which ``flags`` open.

    Raises `TimeoutError` after ``seconds``, which names the process that holds it, and `OSError`.
    """
    with forks.open_lockable() as descriptors:
        descriptor = os.open(path, flags, 0o600)
        descriptors.add(descriptor)
    try:
        deadline, pause = time.monotonic() + seconds, 0.0005
        while not try_lock(descriptor):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{path} has been locked for {seconds:g} s by {_holder(descriptor)}: end that"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        try:
            yield
        finally:
            # explicitly: a child that was not forked by os.fork holds the descriptor too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        forks.close_lockable(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock a descriptor without waiting; return True on success."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    """The holder of the lock on the file of ``descriptor``, as text, as far as the system tells."""
    inode = str(os.fstat(descriptor).st_ino)
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as table:
        for line in table:
            fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 00:2d:1234 0 EOF
            if "FLOCK" in fields[1:2] and fields[-3].rpartition(":")[2] == inode and "->" not in fields:
                return f"process {fields[-4]}"
    return "another process"


def _claim(folder: Folder, mode: int) -> tuple[str, int]:
    """Name and descriptor of a new file, locked."""
    while True:
        name, flags = f"{ASIDE}{os.getpid()}.{secrets.token_hex(8)}", os.O_RDWR | os.O_CREAT | os.O_EXCL
        descriptor = os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=folder.descriptor)
        try:
            if try_lock(descriptor) and os.fstat(descriptor).st_nlink:
                return name, descriptor
        except BaseException:  # such as a file system without locks
            os.close(descriptor)
            folder.remove(name)
            raise
        os.close(descriptor)  # another sweeps it, that came before it was locked
