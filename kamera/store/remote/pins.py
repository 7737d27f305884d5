"""The pages of a book of pins beside the objects of a remote: every client that collects there honours them.

Each pin is one small blob with its object's name; the cap is another. Not every service can compare and
replace a blob, so the pages are written first and compared with the cap then: of two clients that pin at once
both may be refused, but never can both exceed the cap.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from math import inf, isfinite

from kamera.errors import CorruptChunk, PinsFull, RemoteUnavailable
from kamera.store.keys import is_key
from kamera.store.pins import Pages, Pin, over_cap
from kamera.store.remote.blobs import PINS, Head
from kamera.store.remote.guard import Guard
from kamera.store.remote.listing import Listing

logger = logging.getLogger(__name__)

_CAP = "cap"
_BYTES = 64  # most of a pin


class RemotePlace:
    """One tenant's pages in a remote. Safe to use from several threads and machines.

    Their clocks must agree as closely as a ``ttl`` should hold. A pin that cannot be read holds for good:
    no object counts as unpinned because of damage. Raises `RemoteUnavailable`; the pages are as before then,
    as far as the remote answers.
    """

    def __init__(self, blobs: Guard) -> None:
        self._blobs = blobs
        self._listing = Listing(blobs, PINS, is_key, _BYTES, _read)

    def read(self) -> Pages:
        """See `Place`."""
        return Pages({pin.name: pin for pin in self._listing()}, self._cap())

    @contextlib.contextmanager
    def changing(self) -> Iterator[Pages]:
        """See `Place`."""
        before = self.read()
        pages = Pages(dict(before.pins), before.cap)
        yield pages
        try:
            grown = self._write(before, pages)
            after = self.read() if grown and pages.cap is not None else pages
            if grown and after.cap is not None and after.bytes > after.cap:
                raise over_cap(after.bytes, after.cap)
        except (RemoteUnavailable, PinsFull):
            with contextlib.suppress(RemoteUnavailable):
                self._write(pages, before)
            raise

    def alone(self) -> AbstractContextManager[None]:
        """See `Place`: nobody is excluded."""
        return contextlib.nullcontext()

    def _write(self, before: Pages, after: Pages) -> bool:
        """Turn the pages ``before`` into those ``after``; return True if a pin was written."""
        fresh = [pin for name, pin in after.pins.items() if before.pins.get(name) != pin]
        for pin in fresh:
            until = inf if pin.expires is None else pin.expires
            self._blobs.put(PINS + pin.name, f"{pin.bytes} {until!r}".encode())
        if gone := before.pins.keys() - after.pins.keys():
            self._blobs.discard([PINS + name for name in gone])
        if after.cap != before.cap:
            if after.cap is None:
                self._blobs.delete(PINS + _CAP)
            else:
                self._blobs.put(PINS + _CAP, str(after.cap).encode())
        return bool(fresh)

    def _cap(self) -> int | None:
        try:
            data = self._blobs.get(PINS + _CAP)
        except CorruptChunk:
            data = b""
        if data is None or data.isdigit():
            return None if data is None else int(data)
        logger.warning("the cap on pins of %s cannot be read: nothing more can be pinned", self._blobs.url)
        return 0


def _read(name: str, head: Head) -> Pin:
    size, _, until = head.data.decode(errors="replace").partition(" ")
    with contextlib.suppress(ValueError):
        expires = float(until)
        if size.isdigit() and (expires == inf or isfinite(expires)):
            return Pin(name, int(size), None if expires == inf else expires)
    logger.warning("the pin of %s cannot be read: it holds until it is let go", name)
    return Pin(name, 0, None)
