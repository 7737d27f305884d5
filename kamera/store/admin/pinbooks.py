"""The places of a store's pins: memory, its directory, or beside the objects of its remote."""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterable, Mapping

from kamera.errors import StoreError
from kamera.store.admin.pins import NO_HOMES, Pin, PinBook, Pins, check_cap, check_ttl, over_cap
from kamera.store.memory import MemoryTier
from kamera.store.tiers import Tiers


def book_of(tiers: Tiers) -> PinBook:
    """The pins of the objects in ``tiers``: with a remote the remote's, shared by all its clients."""
    here = None if tiers.disk is None else Pins(tiers.disk.root)
    if tiers.remote is None:
        return MemoryPins(tiers.memory) if here is None else here
    return tiers.remote.pins if here is None else CachedPins(tiers.remote.pins, here)


class MemoryPins:
    """Pins of this process's memory, for as long as it lives; as `PinBook`. At most half of it."""

    def __init__(self, memory: MemoryTier) -> None:
        self._memory = memory

    def pin(
        self,
        objects: Iterable[tuple[str, int]],
        ttl: float | None = None,
        homes: Mapping[str, str] = NO_HOMES,
    ) -> None:
        """See `PinBook`; `StoreError` for an object evicted meanwhile."""
        check_ttl(ttl)
        wanted = dict(objects)
        others = sum(size for name, size, _ in self._memory.pinned() if name not in wanted)
        held, cap = others + sum(wanted.values()), self.cap
        if held > cap:
            raise over_cap(held, cap)
        for name in wanted:
            if not self._memory.pin(name, ttl):
                raise StoreError(f"{name} was evicted from memory before it was pinned: put it again")

    def unpin(self, names: Iterable[str]) -> int:
        """See `PinBook`."""
        return sum(self._memory.unpin(name) for name in names)

    def list(self) -> builtins.list[Pin]:
        """See `PinBook`."""
        now = time.time()
        held = (
            (name, size, None if left is None else now + left) for name, size, left in self._memory.pinned()
        )
        return sorted((Pin(*pin) for pin in held), key=lambda pin: pin.name)

    @property
    def cap(self) -> int:
        """See `PinBook`; half of the memory, or less."""
        return self._memory.pin_limit

    def set_cap(self, cap: int | None) -> None:
        """See `PinBook`."""
        check_cap(cap)
        self._memory.pin_cap = cap


class CachedPins:
    """Pins of a remote, which its cache directory ``here`` also honours; as `PinBook`."""

    def __init__(self, there: PinBook, here: Pins) -> None:
        self._there = there
        self._here = here

    def pin(
        self,
        objects: Iterable[tuple[str, int]],
        ttl: float | None = None,
        homes: Mapping[str, str] = NO_HOMES,
    ) -> None:
        """See `PinBook`; nothing is pinned while the remote does not answer."""
        wanted = list(objects)
        self._there.pin(wanted, ttl, homes)
        self._here.pin(wanted, ttl, homes)

    def unpin(self, names: Iterable[str]) -> int:
        """See `PinBook`."""
        wanted = list(names)
        count = self._there.unpin(wanted)
        self._here.unpin(wanted)
        return count

    def list(self) -> builtins.list[Pin]:
        """See `PinBook`."""
        return self._there.list()

    @property
    def cap(self) -> int | None:
        """See `PinBook`."""
        return self._there.cap

    def set_cap(self, cap: int | None) -> None:
        """See `PinBook`."""
        self._there.set_cap(cap)
