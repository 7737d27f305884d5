"""Collection: objects leave a directory or a remote by their value (`eviction`), old leftovers with them."""

from __future__ import annotations

import time

from kamera.store.admin.quarantine import Quarantine
from kamera.store.eviction import choose, recompute_value
from kamera.store.info import Collected, Progress, Removed, Weighed, ignore_progress
from kamera.store.tiers import Tiers

_AT_ONCE = 256
"""Objects that leave after one look at the pins: one round trip, if a service supports that."""


def collect(
    tiers: Tiers,
    tenant: str | None,
    max_bytes: int | None,
    quarantine_age: float | None = None,
    dry_run: bool = False,
    progress: Progress = ignore_progress,
) -> Collected:
    """`StoreAdmin.gc`; ``tenant`` None: all tenants."""
    now, ward = time.time(), Quarantine(tiers)
    if tiers.remote is not None:
        objects = [Weighed.of(info) for info in tiers.remote.listing.infos()]
    else:
        assert tiers.disk is not None, "what is in memory has its own limit"
        objects = list(tiers.disk.index.weigh(tenant))
    removed: list[Removed] = []
    victims = list(choose(objects, tiers.pins.names_to_keep(), max_bytes, now))
    for start in range(0, len(victims), _AT_ONCE):
        batch = victims[start : start + _AT_ONCE]
        outcomes = [True] * len(batch) if dry_run else tiers.remove_unpinned([row for row, _ in batch])
        for (row, reason), is_removed in zip(batch, outcomes, strict=True):
            if is_removed:
                removed.append(Removed(row.key, row.kind, row.bytes, recompute_value(row, now), reason))
        progress(start + len(batch), len(victims))
    copies = [] if quarantine_age is None else ward.copies()
    old_files = [copy.file for copy in copies if copy.when < now - (quarantine_age or 0)]
    bytes_before = sum(row.bytes for row in objects)
    return Collected(
        objects_before=len(objects),
        bytes_before=bytes_before,
        objects_after=len(objects) - len(removed),
        bytes_after=bytes_before - sum(one.bytes for one in removed),
        removed=tuple(removed),
        leftovers=0 if dry_run or tiers.disk is None else tiers.disk.remove_leftovers(),
        quarantined=len(old_files) if dry_run else sum(ward.drop(file) for file in old_files),
    )
