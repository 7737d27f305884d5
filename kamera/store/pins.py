"""Pins: objects that `gc` must not remove until they are unpinned or their ttl ends.

One book, of one text, whatever holds it: the memory of a process, a file of a directory (`disk.keep`), or a
blob of a remote. It cannot be rebuilt from the objects: a lost index costs time, a lost pin costs the object
it kept. So a damaged book is an error, and no object counts as unpinned because of it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kamera.errors import PinsFull, StoreError
from kamera.store.quantities import parse_duration, parse_size

NO_HOMES: Mapping[str, str] = {}


@dataclass(frozen=True)
class PinEntry:
    """A pinned object: its bytes, the end of the pin (seconds since 1970; None: for good), and its ``home``,
    without which it is of no use, and which stays with it."""

    name: str
    bytes: int
    expires: float | None
    home: str | None = None

    def is_in_force(self, now: float) -> bool:
        """True if it has not ended by ``now``."""
        return self.expires is None or self.expires > now


_FORMAT = 1


@dataclass
class Pages:
    """What a book says: pins by name, most bytes that may be pinned at once (None: any number).

    ``remote``: of a directory that is a cache, the url of what it caches.
    """

    pins: dict[str, PinEntry] = field(default_factory=dict)
    cap: int | None = None
    remote: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all pins."""
        return sum(pin.bytes for pin in self.pins.values())

    def text(self) -> bytes:
        """The pages as they are kept."""
        pins = {pin.name: [pin.bytes, pin.expires, pin.home] for pin in self.pins.values()}
        return json.dumps({"format": _FORMAT, "pins": pins, "cap": self.cap, "remote": self.remote}).encode()

    @classmethod
    def of(cls, text: bytes | None) -> Pages:
        """The inverse of `text` (None: nothing is pinned). Raises `ValueError` or `TypeError` for another."""
        data = json.loads(cls().text() if text is None else text)
        if not isinstance(data, dict) or data.keys() != {"format", "pins", "cap", "remote"}:
            raise ValueError("it is not what is written there")
        pages = cls({n: PinEntry(n, *pin) for n, pin in data["pins"].items()}, data["cap"], data["remote"])
        fits = [isinstance(pages.cap, int | None), isinstance(pages.remote, str | None)]
        for pin in pages.pins.values():
            fits += [isinstance(pin.bytes, int), isinstance(pin.expires, int | float | None)]
            fits.append(isinstance(pin.home, str | None))
        if data["format"] != _FORMAT or not all(fits):
            raise ValueError("it makes no sense")
        return pages


class PinCell:
    """The text of a book, at ``where``; here of this process alone. Safe for all who have the text."""

    where = "in memory"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: bytes | None = None

    def get(self) -> bytes | None:
        """The present text; None if there is none."""
        return self._data

    def replace(self, data: bytes, expected: bytes | None) -> bool:
        """Write ``data`` if the text still is ``expected``; True if it was, and ``data`` is safe now."""
        with self._lock:
            fits = self._data == expected
            self._data = data if fits else self._data
        return fits

    def exclude_others(self) -> AbstractContextManager[None]:
        """Exclude others from changing the text or deleting by it, where that is possible: here not."""
        return contextlib.nullcontext()


class PinBook:
    """The pins of a store. Safe to use from several threads and processes; raises as its cell does.

    Raises `StoreError` for a text that is damaged. ``most``: a cap that nothing raises. ``also``: a book that
    gets the same pins, as that of a remote's cache directory. ``clock`` returns seconds since 1970.
    """

    def __init__(
        self,
        cell: PinCell,
        clock: Callable[[], float] = time.time,
        also: PinBook | None = None,
        most: int | None = None,
    ) -> None:
        self.cell = cell
        self._clock = clock
        self._also = also
        self._most = most

    def pin(
        self,
        objects: Iterable[tuple[str, int]],
        ttl: float | str | None = None,
        homes: Mapping[str, str] = NO_HOMES,
    ) -> None:
        """Pin objects (name, bytes), all or none; those pinned already get the new ``ttl``.

        ``homes``: name of a patch to the name of its canonical, which is not collected either.
        Raises `PinsFull` when the pinned bytes would exceed `cap`, `ValueError` for what is no time.
        """
        sizes = dict(objects)
        seconds = None if ttl is None else parse_duration(ttl)
        if seconds == 0:
            raise ValueError("a pin of 0 seconds keeps nothing: give more")
        expires = None if seconds is None else self._clock() + seconds
        for pages in self._changing():
            pages.pins.update({n: PinEntry(n, size, expires, homes.get(n)) for n, size in sizes.items()})
            if pages.cap is not None and pages.size > pages.cap:
                raise PinsFull(
                    f"{pages.size} bytes would be pinned, over the cap of {pages.cap}: unpin something, or "
                    "raise the cap"
                )
        if self._also is not None:
            self._also.pin(sizes.items(), ttl, homes)

    def unpin(self, names: Iterable[str]) -> int:
        """Unpin objects; return the number that were pinned."""
        unique_names, count = list(dict.fromkeys(names)), 0
        if self._pages(self.cell.get()).pins.keys() & set(unique_names):
            for pages in self._changing():
                count = sum(pages.pins.pop(name, None) is not None for name in unique_names)
        if self._also is not None:
            self._also.unpin(unique_names)
        return count

    def list(self) -> list[PinEntry]:
        """All pins in force, by name."""
        now, pins = self._clock(), self._pages(self.cell.get()).pins
        return [pins[name] for name in sorted(pins) if pins[name].is_in_force(now)]

    def names_to_keep(self) -> set[str]:
        """Names that must not be collected now: pinned objects, and the canonicals of pinned patches."""
        return {name for pin in self.list() for name in (pin.name, pin.home) if name}

    @property
    def cap(self) -> int | None:
        """Most bytes that may be pinned at once; None for no such limit."""
        return self._pages(self.cell.get()).cap

    def set_cap(self, cap: int | str | None) -> None:
        """Bound the bytes of future pins; present pins stay. Raises `ValueError` for what is no size."""
        size = None if cap is None else parse_size(cap, "cap")
        for pages in self._changing():
            pages.cap = size

    @property
    def remote(self) -> str | None:
        """The url (without credentials) of the remote that the directory caches; None if it caches none."""
        return self._pages(self.cell.get()).remote

    def note_cached_remote(self, url: str) -> None:
        """Note that the directory caches the remote at ``url``. Raises `StoreError` if it caches another."""
        for pages in self._changing():
            if pages.remote not in (None, url):
                raise StoreError(
                    f"{self.cell.where}: this is the cache of {pages.remote}, not of {url}: give each "
                    "remote a directory of its own"
                )
            pages.remote = url

    def _pages(self, text: bytes | None) -> Pages:
        try:
            pages = Pages.of(text)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"pins {self.cell.where}: {error}; if it is damaged, delete it and pin again: until then "
                "nothing is collected"
            ) from error
        if self._most is not None:
            pages.cap = self._most if pages.cap is None else min(self._most, pages.cap)
        return pages

    def _changing(self) -> Iterator[Pages]:
        """The pages in force, for a loop that changes them: once, and again if others were faster."""
        while True:
            text = self.cell.get()
            pages, now = self._pages(text), self._clock()
            pages.pins = {name: pin for name, pin in pages.pins.items() if pin.is_in_force(now)}
            yield pages
            new_text = pages.text()
            if new_text in (text, Pages().text() if text is None else text) or self.cell.replace(
                new_text, text
            ):
                return
