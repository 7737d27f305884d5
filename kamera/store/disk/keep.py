"""The one small file of a directory that cannot be rebuilt: pins, their cap, and the remote it caches.

It is written whole: aside, synced, renamed. Changing it, and deleting unpinned objects, happens under the
lock of the folder of objects, so neither acts on data that the other is about to change.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kamera.errors import StoreError
from kamera.store.disk.locks import folder_locked
from kamera.store.disk.marker import ASIDE

KEEP = "keep.json"
"""Name of the file in a store directory."""

_FORMAT = 1
_LOCK_SECONDS = 60.0


class Keep:
    """The contents of ``root``/keep.json. Safe to use from several threads and processes.

    Raises `StoreError` when it is damaged or cannot be written: no object counts as unpinned because of
    that. Reading creates no file.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / KEEP
        self._held = threading.local()

    def read(self) -> dict[str, Any]:
        """The present contents."""
        with self._translated():
            try:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return _empty()
            with open(descriptor, "rb") as file:
                return _parsed(file.read())

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Exclude others from changing the file or deleting by its contents; a thread may enter twice."""
        if getattr(self._held, "by_me", False):
            yield
            return
        folder = self.path.with_name("objects")
        with contextlib.ExitStack() as stack:
            with self._translated():
                stack.enter_context(
                    folder_locked(folder if folder.is_dir() else self.path.parent, _LOCK_SECONDS)
                )
            self._held.by_me = True
            try:
                yield
            finally:
                self._held.by_me = False

    @contextlib.contextmanager
    def changing(self) -> Iterator[dict[str, Any]]:
        """The contents, to be modified; on the disk at the end. An exception changes nothing."""
        with self.alone():
            said, before = self.read(), self.read()
            yield said
            if said != before:
                with self._translated():
                    self._write(json.dumps(said).encode())

    def _write(self, text: bytes) -> None:
        aside = self.path.with_name(f"{ASIDE}{os.getpid()}.{secrets.token_hex(8)}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(aside, flags, 0o600), "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, self.path)
        finally:
            aside.unlink(missing_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"pins {self.path}: {error}; if it is damaged, delete the file and pin again: until then "
                "nothing is collected"
            ) from error


def remote_of(directory: Path) -> str | None:
    """The url (without credentials) of the remote that ``directory`` caches; None if it caches none."""
    url: str | None = Keep(directory).read()["remote"]
    return url


def _empty() -> dict[str, Any]:
    return {"format": _FORMAT, "pins": {}, "cap": None, "remote": None}


def _parsed(text: bytes) -> dict[str, Any]:
    said = json.loads(text)
    if not isinstance(said, dict) or said.get("format") != _FORMAT or said.keys() != _empty().keys():
        raise ValueError("it is not what is written there")
    for name, pin in said["pins"].items():
        size, expires, of = pin
        if not (
            isinstance(name, str)
            and isinstance(size, int)
            and isinstance(expires, int | float | None)
            and isinstance(of, str | None)
        ):
            raise ValueError(f"the pin of {name} makes no sense")
    if not (isinstance(said["cap"], int | None) and isinstance(said["remote"], str | None)):
        raise ValueError("its cap or remote makes no sense")
    return said
