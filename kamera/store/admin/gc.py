"""Eviction from a store: the objects that save the least recompute per byte are removed first.

The value of an object is the recompute that a use saves, times its use:

    saved = tokens × 1     a canonical or an anchor: its forward; a patch: the conditioned forward
            tokens × 0.5   an encoding: the vision tower
    used  = 2^(−age / half-life) + Σ over its uses of 2^(−(time since) / half-life)
    value = saved × used

A patch serves only together with its canonical, so a canonical can leave only with all its patches;
it is weighed with them: Σ value / Σ bytes. An encoding can leave once no canonical refers to it: without
it, a canonical is useless to a client that lacks the chunk's content. The least value per byte leaves
first, until the rest fits. A patch without its canonical is worth nothing and always leaves. Pinned
objects stay, and so do the canonical of a pinned patch and the encoding of a canonical that stays.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kamera.store.disk.notes import decayed
from kamera.store.disk.tier import DiskTier
from kamera.store.info import Collected, Quarantined, Removed, Weighed
from kamera.store.keys import KINDS, PATCH_KINDS
from kamera.store.pins import PinBook
from kamera.store.remote import RemoteTier
from kamera.store.tiers import Tiers

ENCODING_COST = 0.5
"""The saving of an encoding, in forwards of the language model per token; every other object saves one."""

HEADS = frozenset(KINDS) - frozenset(PATCH_KINDS)
"""Kinds of object that are of use by themselves."""


class Victim(NamedTuple):
    """An object that is to leave, and why."""

    object: Weighed
    reason: str


def value(found: Weighed, now: float) -> float:
    """Tokens whose recompute an object saves, weighted by its use up to ``now`` (seconds since 1970)."""
    saved = found.tokens * (ENCODING_COST if found.kind == "encoding" else 1.0)
    used = decayed(1.0, found.created, now)
    if found.used is not None:
        used += decayed(found.uses, found.used, now)
    return saved * used


def choose(
    objects: Iterable[Weighed], pinned: Collection[str], max_bytes: int | None, now: float
) -> Iterator[Victim]:
    """The objects that leave, in order, so that the rest is at most ``max_bytes`` (None: any number).

    ``pinned``: names that stay. If they are larger than ``max_bytes``, the limit is not reached.
    """
    groups: dict[tuple[str, ...], _Group] = {}
    total = 0
    for found in objects:
        groups.setdefault(found.group, _Group()).add(found, found.key in pinned, now)
        total += found.bytes
    for group in groups.values():
        group.encoding = None if group.head is None else groups.get(group.head.encoding)
        if group.encoding is not None:
            group.encoding.referring += 1
    for group in groups.values():
        if group.head is None:
            for orphan in group.loose():
                group.take(orphan)
                total -= orphan.bytes
                yield Victim(orphan, "its canonical is gone")
    if max_bytes is None:
        return
    queue = list(_offers(groups.values()))
    heapq.heapify(queue)
    while total > max_bytes and queue:
        offer = heapq.heappop(queue)
        group = offer.group
        if offer.patch is None:
            if offer.size != len(group.values):
                continue  # a patch has left since: the group was offered again
            # the canonical last: an interruption leaves no patch without one
            leaving = sorted(group.objects.values(), key=lambda found: found.kind in HEADS)
        elif offer.patch.key in group.objects:
            leaving = [offer.patch]
        else:
            continue
        for found in leaving:
            group.take(found)
            total -= found.bytes
            yield Victim(found, "least value per byte")
        if group.objects:
            free = group
        elif group.encoding is not None:
            free = group.encoding
            free.referring -= 1
        else:
            continue
        if free.is_free:
            heapq.heappush(queue, free.offer())


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


class _Offer(NamedTuple):
    """A patch, or a group's head with its ``size`` - 1 patches, and its value per byte."""

    density: float
    created: float
    name: str
    size: int
    group: _Group
    patch: Weighed | None

    def __lt__(self, other: tuple[object, ...]) -> bool:
        return self[:4] < other[:4]


@dataclass
class _Group:
    """A canonical and its patches; or an encoding, or an anchor, by itself."""

    head: Weighed | None = None
    encoding: _Group | None = None
    referring: int = 0  # canonicals whose encoding it is
    kept: bool = False  # a member is pinned
    objects: dict[str, Weighed] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    bytes: int = 0
    value: float = 0.0

    def add(self, found: Weighed, pinned: bool, now: float) -> None:
        if found.kind in HEADS:
            self.head = found
        if pinned:
            self.kept = True
            self.pinned.add(found.key)
        self.objects[found.key] = found
        self.values[found.key] = value(found, now)
        self.bytes += found.bytes
        self.value += self.values[found.key]

    def take(self, found: Weighed) -> None:
        del self.objects[found.key]
        self.bytes -= found.bytes
        self.value -= self.values.pop(found.key)

    def loose(self) -> list[Weighed]:
        """Patches that may leave alone."""
        return [o for o in self.objects.values() if o.kind not in HEADS and o.key not in self.pinned]

    @property
    def is_free(self) -> bool:
        """True if the whole group may leave."""
        return not self.kept and not self.referring

    def offer(self) -> _Offer:
        """The offer of the whole group."""
        assert self.head is not None
        density = self.value / max(1, self.bytes)
        return _Offer(density, self.head.created, self.head.key, len(self.objects), self, None)


def _offers(groups: Iterable[_Group]) -> Iterator[_Offer]:
    for group in groups:
        if group.head is None:
            continue
        for patch in group.loose():
            density = group.values[patch.key] / max(1, patch.bytes)
            yield _Offer(density, patch.created, patch.key, 1, group, patch)
        if group.is_free:
            yield group.offer()
