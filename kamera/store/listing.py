"""Counts of one tenant's objects, from all tiers; no tensor is read."""

from __future__ import annotations

from kamera.store.info import Census, Selection, StoreStats, Weighed
from kamera.store.keys import KINDS, PATCH_KINDS, check_kind
from kamera.store.tiers import Tiers


def census(tiers: Tiers, tenant: str, kind: str | None) -> Census:
    """Counts of the objects; a directory counts them without listing."""
    check_kind(kind)
    if tiers.disk is not None and tiers.remote is None:
        return tiers.disk.index.census(tenant, kind)
    return Census.of(list(map(Weighed.of, tiers.infos(Selection(kind)))), KINDS if kind is None else (kind,))


def stats(tiers: Tiers, tenant: str, url: str) -> StoreStats:
    """Counts and bytes, and the counters of memory and remote."""
    disk = tiers.disk
    kinds = (
        Census.of(list(map(Weighed.of, tiers.memory.infos())), KINDS).kinds
        if disk is None
        else disk.index.kinds(tenant)
    )
    return StoreStats(
        url=url,
        canonicals=kinds["canonical"].objects,
        patches=sum(kinds[kind].objects for kind in PATCH_KINDS),
        encodings=kinds["encoding"].objects,
        anchors=kinds["anchor"].objects,
        conditioned=kinds["conditioned"].objects,
        bytes=sum(count.bytes for count in kinds.values()),
        memory=tiers.memory.stats(),
        remote=tiers.remote_stats(),
        directory=disk is not None,
    )
