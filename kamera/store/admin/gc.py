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
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kamera.store.admin.pins import Pins
from kamera.store.disk.notes import decayed
from kamera.store.disk.tier import DiskTier
from kamera.store.info import Collected, Removed, Weighed
from kamera.store.keys import KINDS, PATCH_KINDS

ENCODING_COST = 0.5
"""The saving of an encoding, in forwards of the language model per token; every other object saves one."""

HEADS = frozenset(KINDS) - frozenset(PATCH_KINDS)
"""Kinds of object that are of use by themselves."""

_AT_ONCE = 64  # objects removed after one look at the pins


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


def clean(
    disk: DiskTier,
    tenant: str | None,
    max_bytes: int | None,
    quarantine_age: float | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Collected:
    """Collect a tenant's objects (None: all tenants'), files of dead writers, and old quarantine copies.

    ``quarantine_age`` in seconds; None keeps every copy. ``progress`` is called with objects removed and
    to remove.
    """
    now = time.time()
    pins = Pins(disk.root)

    def leave(objects: Sequence[Weighed]) -> list[bool]:
        if dry_run:
            return [True] * len(objects)
        with pins.alone():  # pinning waits, so that an acknowledged pin is seen here
            kept = pins.kept()
            return [found.key not in kept and disk.evict(found.key, found.stamp) for found in objects]

    found = list(disk.index.weighed(tenant))
    report = collect(found, pins.kept(), max_bytes, leave, now, progress)
    if quarantine_age is None:
        old = []
    else:
        old = [copy.file for copy in disk.quarantined() if copy.when < now - quarantine_age]
    return replace(
        report,
        leftovers=0 if dry_run else disk.collect(),
        quarantined=len(old) if dry_run else sum(disk.drop_quarantined(file) for file in old),
    )


def collect(
    objects: list[Weighed],
    pinned: Collection[str],
    max_bytes: int | None,
    evict: Callable[[Sequence[Weighed]], Sequence[bool]],
    now: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Collected:
    """Remove the choice of `choose` with ``evict`` (False: replaced or pinned meanwhile, so it stays)."""
    removed = []
    victims = list(choose(objects, pinned, max_bytes, now))
    for start in range(0, len(victims), _AT_ONCE):
        batch = victims[start : start + _AT_ONCE]
        gone = evict([found for found, _ in batch])
        for (found, reason), left in zip(batch, gone, strict=True):
            if left:
                removed.append(Removed(found.key, found.kind, found.bytes, value(found, now), reason))
        progress(start + len(batch), len(victims))
    before = sum(found.bytes for found in objects)
    return Collected(
        objects_before=len(objects),
        bytes_before=before,
        objects_after=len(objects) - len(removed),
        bytes_after=before - sum(gone.bytes for gone in removed),
        removed=tuple(removed),
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
