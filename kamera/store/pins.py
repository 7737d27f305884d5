"""Pins: objects that `gc` must not remove until they are unpinned or their ttl ends.

One book, whatever holds its pages: the memory of a process, a file of a directory (`disk.keep`), or blobs of
a remote (`remote.pins`). They cannot be rebuilt from the objects: a lost index costs time, a lost pin costs
the object it kept.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from kamera.errors import PinsFull

NO_HOMES: Mapping[str, str] = {}


@dataclass(frozen=True)
class Pin:
    """A pinned object: its size when pinned, and the pin's end (seconds since 1970; None: for good).

    ``home``: the object without which it is of no use, which is not collected either.
    """

    name: str
    bytes: int
    expires: float | None
    home: str | None = None

    def holds(self, now: float) -> bool:
        """True if it has not ended by ``now``."""
        return self.expires is None or self.expires > now


@dataclass
class Pages:
    """What a book says: pins by name, most bytes that may be pinned at once (None: any number).

    ``remote``: of a directory that is a cache, the url of what it caches.
    """

    pins: dict[str, Pin] = field(default_factory=dict)
    cap: int | None = None
    remote: str | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all pins."""
        return sum(pin.bytes for pin in self.pins.values())


class Place(Protocol):
    """Where the pages of a book are. Safe to use from several threads, and whoever else has them."""

    def read(self) -> Pages:
        """The present pages, not to be modified."""
        ...

    def changing(self) -> AbstractContextManager[Pages]:
        """The pages, to be modified; they are safe at the end, and as before after an exception.

        Raises `PinsFull` if others have filled them up to the cap meanwhile.
        """
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Exclude others from changing pages or deleting by them, where that is possible."""
        ...


class MemoryPlace:
    """Pages of this process; at most ``most`` bytes may be pinned."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._pages = Pages(cap=most)

    def read(self) -> Pages:
        """See `Place`."""
        return self._pages

    @contextlib.contextmanager
    def changing(self) -> Iterator[Pages]:
        """See `Place`."""
        with self._lock:
            pages = Pages(dict(self._pages.pins), self._pages.cap)
            yield pages
            pages.cap = self._most if pages.cap is None else min(self._most, pages.cap)
            self._pages = pages

    def alone(self) -> AbstractContextManager[None]:
        """See `Place`."""
        return contextlib.nullcontext()


class PinBook:
    """The pins of a store. Safe to use from several threads; raises as its place does.

    ``also``: a book that gets the same pins, as that of a remote's cache directory. ``clock`` returns seconds
    since 1970.
    """

    def __init__(
        self, place: Place, clock: Callable[[], float] = time.time, also: PinBook | None = None
    ) -> None:
        self.place = place
        self._clock = clock
        self._also = also

    def pin(
        self,
        objects: Iterable[tuple[str, int]],
        ttl: float | None = None,
        homes: Mapping[str, str] = NO_HOMES,
    ) -> None:
        """Pin objects (name, bytes), all or none; those pinned already get the new ``ttl`` (seconds).

        ``homes``: name of a patch to the name of its canonical, which is not collected either.
        Raises `PinsFull` when the pinned bytes would exceed `cap`, `ValueError` for an invalid ``ttl``.
        """
        if ttl is not None and not ttl > 0:
            raise ValueError(f"a pin lasts more than 0 seconds, got {ttl}")
        wanted = dict(objects)
        expires = None if ttl is None else self._clock() + ttl
        with self.place.changing() as pages:
            self._purge(pages)
            pages.pins.update({n: Pin(n, size, expires, homes.get(n)) for n, size in wanted.items()})
            if pages.cap is not None and pages.bytes > pages.cap:
                raise over_cap(pages.bytes, pages.cap)
        if self._also is not None:
            self._also.pin(wanted.items(), ttl, homes)

    def unpin(self, names: Iterable[str]) -> int:
        """Unpin objects; return the number that were pinned."""
        wanted, count = list(dict.fromkeys(names)), 0
        if self.place.read().pins.keys() & set(wanted):
            with self.place.changing() as pages:
                self._purge(pages)
                count = sum(pages.pins.pop(name, None) is not None for name in wanted)
        if self._also is not None:
            self._also.unpin(wanted)
        return count

    def list(self) -> list[Pin]:
        """All pins in force, by name."""
        now, pins = self._clock(), self.place.read().pins
        return [pins[name] for name in sorted(pins) if pins[name].holds(now)]

    def kept(self) -> set[str]:
        """Names that must not be collected now: pinned objects, and the canonicals of pinned patches."""
        return {name for pin in self.list() for name in (pin.name, pin.home) if name}

    @property
    def cap(self) -> int | None:
        """Most bytes that may be pinned at once; None for no such limit."""
        return self.place.read().cap

    def set_cap(self, cap: int | None) -> None:
        """Bound the bytes of future pins; present pins stay. Raises `ValueError` for an invalid size."""
        if cap is not None and cap < 0:
            raise ValueError(f"a cap is a number of bytes, got {cap}")
        with self.place.changing() as pages:
            pages.cap = cap

    def _purge(self, pages: Pages) -> None:
        now = self._clock()
        pages.pins = {name: pin for name, pin in pages.pins.items() if pin.holds(now)}


def over_cap(held: int, cap: int) -> PinsFull:
    """The error for pins that would take ``held`` bytes."""
    return PinsFull(f"{held} bytes would be pinned, over the cap of {cap}: unpin something, or raise the cap")
