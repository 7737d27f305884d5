"""The one small file of a directory that cannot be rebuilt: the book of its pins, for all its tenants.

It is written whole: aside, synced, renamed. Changing it, and deleting unpinned objects, happens under the
lock of the folder of objects, so neither acts on data that the other is about to change.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from kamera.errors import StoreError
from kamera.files import lock_path, publish_file
from kamera.store.pins import PinCell

KEEP = "keep.json"
"""Name of the file in a store directory."""


class PinFile(PinCell):
    """The text of the book in ``root``; see `PinCell`. Safe to use from several threads and processes.

    The file appears with the first change. Raises `StoreError` when it cannot be read or written.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / KEEP
        self.where = str(self.path)

    def get(self) -> bytes | None:
        with self._translate():
            try:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            with open(descriptor, "rb") as file:
                return file.read()

    def replace(self, data: bytes, expected: bytes | None) -> bool:
        with self.exclude_others():
            if self.get() != expected:
                return False
            with self._translate(), publish_file(self.path) as file:
                file.write(data)
            return True

    @contextlib.contextmanager
    def exclude_others(self) -> Iterator[None]:
        folder = self.path.with_name("objects")
        with contextlib.ExitStack() as stack:
            with self._translate():
                stack.enter_context(lock_path(folder if folder.is_dir() else self.path.parent))
            yield

    @contextlib.contextmanager
    def _translate(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"pins {self.path}: {error}: until they can be used nothing is collected"
            ) from error
