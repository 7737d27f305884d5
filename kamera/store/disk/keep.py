"""The one small file of a directory that cannot be rebuilt: pins, their cap, and the remote it caches.

It is written whole: aside, synced, renamed. Changing it, and deleting unpinned objects, happens under the
lock of the folder of objects, so neither acts on data that the other is about to change.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from kamera.errors import StoreError
from kamera.files import published
from kamera.store.disk.locks import folder_locked
from kamera.store.pins import Pages, Pin

KEEP = "keep.json"
"""Name of the file in a store directory."""

_FORMAT = 1
_LOCK_SECONDS = 60.0


class Keep:
    """The pages of the pins in ``root``, for all its tenants. Safe to use from several threads and processes.

    The file appears with the first change, and a change is on the disk when `changing` ends. Raises
    `StoreError` when it is damaged or cannot be written: no object counts as unpinned because of that.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / KEEP
        self._held = threading.local()

    def read(self) -> Pages:
        """See `Place`."""
        with self._translated():
            try:
                descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return Pages()
            with open(descriptor, "rb") as file:
                return _parsed(file.read())

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """See `Place`; a thread may enter twice."""
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
    def changing(self) -> Iterator[Pages]:
        """See `Place`."""
        with self.alone():
            pages, before = self.read(), self.read()
            yield pages
            if pages != before:
                with self._translated(), published(self.path) as file:
                    file.write(_text(pages))

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"pins {self.path}: {error}; if it is damaged, delete the file and pin again: until then "
                "nothing is collected"
            ) from error


def _text(pages: Pages) -> bytes:
    pins = {pin.name: [pin.bytes, pin.expires, pin.home] for pin in pages.pins.values()}
    return json.dumps({"format": _FORMAT, "pins": pins, "cap": pages.cap, "remote": pages.remote}).encode()


def _parsed(text: bytes) -> Pages:
    said = json.loads(text)
    if not isinstance(said, dict) or said.keys() != {"format", "pins", "cap", "remote"}:
        raise ValueError("it is not what is written there")
    pages = Pages({n: Pin(n, *pin) for n, pin in said["pins"].items()}, said["cap"], said["remote"])
    numbers = [pages.cap or 0, *(pin.bytes for pin in pages.pins.values())]
    times = [pin.expires or 0.0 for pin in pages.pins.values()]
    texts = [pages.remote or "", *(pin.home or "" for pin in pages.pins.values())]
    fits = all(isinstance(n, int) for n in numbers) and all(isinstance(t, int | float) for t in times)
    if said["format"] != _FORMAT or not (fits and all(isinstance(text, str) for text in texts)):
        raise ValueError("it makes no sense")
    return pages


def remote_of(directory: Path) -> str | None:
    """The url (without credentials) of the remote that ``directory`` caches; None if it caches none."""
    return Keep(directory).read().remote
