"""Pins: objects that `gc` must not remove until they are unpinned or their ttl ends.

They are in a file of their own (`disk.keep`), because they cannot be rebuilt from the objects: a lost
index costs time, a lost pin costs the object it kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kamera.errors import PinsFull
from kamera.store.disk.keep import KEEP, Keep

PINS = KEEP
"""The file of a store directory that holds its pins."""


NO_HOMES: Mapping[str, str] = {}


@dataclass(frozen=True)
class Pin:
    """A pinned object: its size when pinned, and the pin's end (seconds since 1970; None: for good)."""

    name: str
    bytes: int
    expires: float | None


class PinBook(Protocol):
    """The pins of a store. Safe to use from several threads."""

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
        ...

    def unpin(self, names: Iterable[str]) -> int:
        """Unpin objects; return the number that were pinned."""
        ...

    def list(self) -> list[Pin]:
        """All pins in force, by name."""
        ...

    @property
    def cap(self) -> int | None:
        """Most bytes that may be pinned at once; None for no such limit."""
        ...

    def set_cap(self, cap: int | None) -> None:
        """Bound the bytes of future pins; present pins stay. Raises `ValueError` for an invalid size."""
        ...


def check_ttl(ttl: float | None) -> None:
    """Raise `ValueError` for an invalid duration of a pin."""
    if ttl is not None and not ttl > 0:
        raise ValueError(f"a pin lasts more than 0 seconds, got {ttl}")


def check_cap(cap: int | None) -> None:
    """Raise `ValueError` for an invalid number of bytes."""
    if cap is not None and cap < 0:
        raise ValueError(f"a cap is a number of bytes, got {cap}")


def over_cap(held: int, cap: int) -> PinsFull:
    """The error for pins that would take ``held`` bytes."""
    return PinsFull(f"{held} bytes would be pinned, over the cap of {cap}: unpin something, or raise the cap")


class Pins:
    """The pins of the store directory ``root``, for all its tenants. Safe to use from threads and processes.

    The file appears with the first pin. A pin is on the disk when `pin` returns. Raises `StoreError`
    when the file is damaged or cannot be written: no object counts as unpinned because of that.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.time) -> None:
        self._keep = Keep(root)
        self._clock = clock
        self.path = self._keep.path

    def pin(
        self,
        objects: Iterable[tuple[str, int]],
        ttl: float | None = None,
        homes: Mapping[str, str] = NO_HOMES,
    ) -> None:
        """See `PinBook`."""
        check_ttl(ttl)
        wanted = dict(objects)
        expires = None if ttl is None else self._clock() + ttl
        with self._keep.changing() as said:
            self._purge(said["pins"])
            said["pins"].update({name: [size, expires, homes.get(name)] for name, size in wanted.items()})
            held = sum(size for size, _, _ in said["pins"].values())
            if said["cap"] is not None and held > said["cap"]:
                raise over_cap(held, said["cap"])

    def unpin(self, names: Iterable[str]) -> int:
        """Unpin objects; return the number that were pinned."""
        wanted = list(names)
        if not self._keep.read()["pins"].keys() & set(wanted):
            return 0
        with self._keep.changing() as said:
            gone = [said["pins"].pop(name, None) for name in wanted]
            self._purge(said["pins"])
        return len(gone) - gone.count(None)

    def list(self) -> list[Pin]:
        """All pins in force, by name."""
        pins = self._keep.read()["pins"].items()
        return sorted(
            (Pin(name, size, expires) for name, (size, expires, _) in pins if self._holds(expires)),
            key=lambda pin: pin.name,
        )

    def kept(self) -> set[str]:
        """Names that must not be collected now: pinned objects, and the canonicals of pinned patches."""
        pins = self._keep.read()["pins"].items()
        return {n for name, (_, until, home) in pins if self._holds(until) for n in (name, home) if n}

    def alone(self) -> AbstractContextManager[None]:
        """Exclude other pinning and collecting inside."""
        return self._keep.alone()

    @property
    def cap(self) -> int | None:
        """Most bytes that may be pinned at once; None for no such limit."""
        cap: int | None = self._keep.read()["cap"]
        return cap

    def set_cap(self, cap: int | None) -> None:
        """See `PinBook`; for every process."""
        check_cap(cap)
        with self._keep.changing() as said:
            said["cap"] = cap

    def _holds(self, expires: float | None) -> bool:
        return expires is None or expires > self._clock()

    def _purge(self, pins: dict[str, tuple[int, float | None, str | None]]) -> None:
        for name in [name for name, (_, expires, _) in pins.items() if not self._holds(expires)]:
            del pins[name]
