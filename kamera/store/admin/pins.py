"""Pins: objects that `gc` must not take, until they are let go or their time is over.

They lie in a file of their own (`disk.keep`), because they cannot be made anew from the objects: a lost
index costs time, a lost pin costs what it kept.
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
"""The file of a store directory in which its pins stand."""


NO_HOMES: Mapping[str, str] = {}


@dataclass(frozen=True)
class Pin:
    """One pinned object: its size when it was pinned, and until when (seconds since 1970; None: for good)."""

    name: str
    bytes: int
    expires: float | None


class PinBook(Protocol):
    """Where the pins of a store are kept. Safe to use from several threads."""

    def pin(
        self,
        objects: Iterable[tuple[str, int]],
        ttl: float | None = None,
        homes: Mapping[str, str] = NO_HOMES,
    ) -> None:
        """Pin objects (name, bytes), all or none; those pinned already get the new ``ttl`` (seconds).

        ``homes``: by name of a patch, that of its canonical, which is not collected either.
        Raises `PinsFull` when the pinned bytes would exceed `cap`, `ValueError` for a ``ttl`` that is none.
        """
        ...

    def unpin(self, names: Iterable[str]) -> int:
        """Let objects go; how many of them were pinned."""
        ...

    def list(self) -> list[Pin]:
        """All pins that hold now, by name."""
        ...

    @property
    def cap(self) -> int | None:
        """Most bytes that may be pinned at once; None for no such limit."""
        ...

    def set_cap(self, cap: int | None) -> None:
        """Bound the bytes of future pins; what is pinned stays. `ValueError` for what is no size."""
        ...


def check_ttl(ttl: float | None) -> None:
    """`ValueError` for a time that no pin can last."""
    if ttl is not None and not ttl > 0:
        raise ValueError(f"a pin lasts more than 0 seconds, got {ttl}")


def check_cap(cap: int | None) -> None:
    """`ValueError` for what is no number of bytes."""
    if cap is not None and cap < 0:
        raise ValueError(f"a cap is a number of bytes, got {cap}")


def over_cap(held: int, cap: int) -> PinsFull:
    """The refusal of pins that would make ``held`` bytes."""
    return PinsFull(f"{held} bytes would be pinned, over the cap of {cap}: unpin something, or raise the cap")


class Pins:
    """The pins of the store directory ``root``, for all its tenants. Safe to use from threads and processes.

    The file appears with the first pin. A pin is on the disk when `pin` returns. Raises `StoreError`
    when the file is damaged or cannot be written: nothing is taken for unpinned because of it.
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
        """Let objects go; how many of them were pinned."""
        wanted = list(names)
        if not self._keep.read()["pins"].keys() & set(wanted):
            return 0
        with self._keep.changing() as said:
            gone = [said["pins"].pop(name, None) for name in wanted]
            self._purge(said["pins"])
        return len(gone) - gone.count(None)

    def list(self) -> list[Pin]:
        """All pins that hold now, by name."""
        pins = self._keep.read()["pins"].items()
        return sorted(
            (Pin(name, size, expires) for name, (size, expires, _) in pins if self._holds(expires)),
            key=lambda pin: pin.name,
        )

    def kept(self) -> set[str]:
        """Names of what must not be collected now: what is pinned, and the canonicals of pinned patches."""
        pins = self._keep.read()["pins"].items()
        return {n for name, (_, until, home) in pins if self._holds(until) for n in (name, home) if n}

    def alone(self) -> AbstractContextManager[None]:
        """Inside, nobody else pins or collects."""
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
