"""Collection: objects leave a directory or a remote by their value (`eviction`), old leftovers with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kamera.store.disk.tier import DiskTier
from kamera.store.eviction import choose, value
from kamera.store.info import Collected, Quarantined, Removed, Weighed
from kamera.store.pins import PinBook
from kamera.store.remote import RemoteTier
from kamera.store.tiers import Tiers


class Kept(Protocol):
    """What is collected: objects, the copies in quarantine, and the pins that keep objects."""

    pins: PinBook
    at_once: int
    """Objects that leave after one look at the pins."""

    def objects(self) -> list[Weighed]:
        """The objects that may leave."""
        ...

    def remove(self, objects: Sequence[Weighed]) -> list[bool]:
        """Remove those that are neither pinned nor replaced by now; return which."""
        ...

    def copies(self) -> list[Quarantined]:
        """All copies in quarantine."""
        ...

    def purge(self, copy: str) -> int:
        """Delete a copy; return 1 if it existed."""
        ...

    def clear(self) -> int:
        """Remove what dead writers left; return its number."""
        ...


class _Directory:
    """The objects of a tenant in a directory, or of all its tenants."""

    at_once = 64

    def __init__(self, disk: DiskTier, tenant: str | None) -> None:
        self.pins = disk.pins
        self.copies, self.purge, self.clear = disk.quarantined, disk.drop_quarantined, disk.collect
        self._disk = disk
        self._tenant = tenant

    def objects(self) -> list[Weighed]:
        return list(self._disk.index.weighed(self._tenant))

    def remove(self, objects: Sequence[Weighed]) -> list[bool]:
        with self.pins.place.alone():  # pinning waits, so that an acknowledged pin is seen here
            kept = self.pins.kept()
            return [one.key not in kept and self._disk.evict(one.key, one.stamp) for one in objects]


class _Remote:
    """The objects of a remote, which leave the tiers before it as well; their uses are not counted.

    Every client honours the pins of every other: they are read again before each batch is removed.
    """

    at_once = 256  # in one round trip if the service supports it

    def __init__(self, tiers: Tiers, remote: RemoteTier) -> None:
        self.pins = tiers.pins
        self.copies, self.purge = remote.quarantined, remote.purge
        self._tiers = tiers
        self._remote = remote

    def objects(self) -> list[Weighed]:
        return [Weighed.of(info) for info in self._remote.infos()]

    def remove(self, objects: Sequence[Weighed]) -> list[bool]:
        pinned = self.pins.kept()
        kept = {one.chunk_id for one in objects if one.key in pinned}  # nor any other of their chunks
        self._tiers.discard([one.key for one in objects if one.chunk_id not in kept])
        return [one.chunk_id not in kept for one in objects]

    def clear(self) -> int:
        return 0


def clean(
    tiers: Tiers,
    tenant: str | None,
    max_bytes: int | None,
    quarantine_age: float | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Collected:
    """Collect a tenant's objects (None: all tenants'), files of dead writers, and old quarantine copies.

    ``quarantine_age`` in seconds; None keeps every copy. ``progress`` is called with objects removed and
    to remove. Raises `RemoteUnavailable`: objects removed by then stay removed; run it again.
    """
    now = time.time()
    if tiers.remote is not None:
        return collect(_Remote(tiers, tiers.remote), max_bytes, now, quarantine_age, dry_run, progress)
    assert tiers.disk is not None
    return collect(_Directory(tiers.disk, tenant), max_bytes, now, quarantine_age, dry_run, progress)


def collect(
    kept: Kept,
    max_bytes: int | None,
    now: float,
    quarantine_age: float | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Collected:
    """`clean`, of anything that can be collected."""
    objects = kept.objects()
    removed: list[Removed] = []
    victims = list(choose(objects, kept.pins.kept(), max_bytes, now))
    for start in range(0, len(victims), kept.at_once):
        batch = victims[start : start + kept.at_once]
        gone = [True] * len(batch) if dry_run else kept.remove([found for found, _ in batch])
        for (found, reason), left in zip(batch, gone, strict=True):
            if left:
                removed.append(Removed(found.key, found.kind, found.bytes, value(found, now), reason))
        progress(start + len(batch), len(victims))
    copies = [] if quarantine_age is None else kept.copies()
    old = [copy.file for copy in copies if copy.when < now - (quarantine_age or 0)]
    before = sum(found.bytes for found in objects)
    return Collected(
        objects_before=len(objects),
        bytes_before=before,
        objects_after=len(objects) - len(removed),
        bytes_after=before - sum(one.bytes for one in removed),
        removed=tuple(removed),
        leftovers=0 if dry_run else kept.clear(),
        quarantined=len(old) if dry_run else sum(kept.purge(file) for file in old),
    )
