"""Pins beside the objects of a remote: every client that collects there, on any machine, honours them.

Each pin is one small blob with its object's name; the cap is another. Writing a pin and checking the cap
are separate steps: of two clients that pin at once both may be refused, but never can both exceed the cap.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite

from kamera.errors import CorruptChunk, PinsFull, RemoteUnavailable
from kamera.store.admin.pins import NO_HOMES, Pin, check_cap, check_ttl, over_cap
from kamera.store.keys import is_key
from kamera.store.remote.blobs import PINS, Head
from kamera.store.remote.guard import Guard
from kamera.store.remote.listing import Listing

logger = logging.getLogger(__name__)

_CAP = "cap"
_BYTES = 64  # most of a pin


class RemotePins:
    """One tenant's pins in a remote; as `PinBook`. Safe to use from several threads and machines.

    Their clocks must agree as closely as a ``ttl`` should hold. A pin that cannot be read holds for good:
    no object counts as unpinned because of damage. Raises `RemoteUnavailable`.
    """

    def __init__(self, blobs: Guard, clock: Callable[[], float] = time.time) -> None:
        self._blobs = blobs
        self._clock = clock
        self._listing = Listing(blobs, PINS, is_key, _BYTES, _read)

    def pin(
        self,
        objects: Iterable[tuple[str, int]],
        ttl: float | None = None,
        homes: Mapping[str, str] = NO_HOMES,
    ) -> None:
        """See `PinBook`; after a failure the former pins are restored, as far as the remote answers."""
        check_ttl(ttl)
        until = inf if ttl is None else self._clock() + ttl
        wanted = dict(objects)
        before = dict(zip(wanted, self._blobs.heads([PINS + name for name in wanted], _BYTES), strict=True))
        written: list[str] = []
        try:
            for name, size in wanted.items():
                written.append(name)
                self._blobs.put(PINS + name, f"{size} {until!r}".encode())
            cap = self.cap
            held = 0 if cap is None else sum(pin.bytes for pin in self.list())
            if cap is not None and held > cap:
                raise over_cap(held, cap)
        except (RemoteUnavailable, PinsFull):
            with contextlib.suppress(RemoteUnavailable):
                for name in written:
                    self._restore(name, before[name])
            raise

    def unpin(self, names: Iterable[str]) -> int:
        """See `PinBook`."""
        wanted = list(dict.fromkeys(names))
        held = self.pinned(wanted)
        self.discard(wanted)
        return len(held)

    def discard(self, names: Sequence[str]) -> None:
        """Remove the pins of objects that are gone."""
        self._blobs.discard([PINS + name for name in names])

    def pinned(self, names: Sequence[str]) -> set[str]:
        """Those of ``names`` that are pinned now, from one read of their pins."""
        return {
            pin.name for pin in self._listing.of(builtins.list(names)) if pin is not None and self._holds(pin)
        }

    def list(self) -> builtins.list[Pin]:
        """See `PinBook`."""
        return [pin for pin in self._listing() if self._holds(pin)]

    @property
    def cap(self) -> int | None:
        """See `PinBook`."""
        try:
            data = self._blobs.get(PINS + _CAP)
        except CorruptChunk:
            data = b""
        if data is None:
            return None
        if not data.isdigit():
            logger.warning(
                "the cap on pins of %s cannot be read: nothing more can be pinned", self._blobs.url
            )
            return 0
        return int(data)

    def set_cap(self, cap: int | None) -> None:
        """See `PinBook`."""
        check_cap(cap)
        if cap is None:
            self._blobs.delete(PINS + _CAP)
        else:
            self._blobs.put(PINS + _CAP, str(cap).encode())

    def _restore(self, name: str, before: Head | None) -> None:
        if before is None:
            self._blobs.delete(PINS + name)
        else:
            self._blobs.put(PINS + name, before.data)

    def _holds(self, pin: Pin) -> bool:
        return pin.expires is None or pin.expires > self._clock()


def _read(name: str, head: Head) -> Pin:
    size, _, until = head.data.decode(errors="replace").partition(" ")
    with contextlib.suppress(ValueError):
        expires = float(until)
        if size.isdigit() and (expires == inf or isfinite(expires)):
            return Pin(name, int(size), None if expires == inf else expires)
    logger.warning("the pin of %s cannot be read: it holds until it is let go", name)
    return Pin(name, 0, None)
