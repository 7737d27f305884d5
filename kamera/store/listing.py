"""One tenant's objects as rows and counts, from all tiers; no tensor is read."""

from __future__ import annotations

from kamera.errors import quote
from kamera.store.info import Census, ObjectInfo, StoreStats, Weighed
from kamera.store.keys import KINDS, PATCH_KINDS, Context
from kamera.store.tiers import Tiers


def rows(
    tiers: Tiers,
    tenant: str,
    kind: str | None = None,
    chunk_id: str | None = None,
    context: Context | None = None,
    limit: int | None = None,
    offset: int = 0,
    here: bool = False,
) -> list[ObjectInfo]:
    """The objects, oldest first; at most ``limit`` after the first ``offset``.

    ``here``: only those in directory and memory. Raises `ValueError` for an unknown kind.
    """
    check_kind(kind)
    if tiers.disk is not None and (here or tiers.remote is None):
        return tiers.disk.index.rows(
            tenant=tenant, kind=kind, chunk_id=chunk_id, context=context, limit=limit, offset=offset
        )
    found = [
        info
        for info in (tiers.memory.infos(chunk_id) if here or tiers.remote is None else tiers.infos())
        if kind in (None, info.kind) and chunk_id in (None, info.chunk_id) and context in (None, info.context)
    ]
    return found[offset:][:limit]


def census(tiers: Tiers, tenant: str, kind: str | None) -> Census:
    """Counts of the objects; a directory counts them without listing."""
    check_kind(kind)
    if tiers.disk is not None and tiers.remote is None:
        return tiers.disk.index.census(tenant, kind)
    return Census.of(list(map(Weighed.of, rows(tiers, tenant, kind))), KINDS if kind is None else (kind,))


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
        bytes=sum(held.bytes for held in kinds.values()),
        memory=tiers.memory.stats(),
        remote=tiers.remote_stats(),
        directory=disk is not None,
    )


def check_kind(kind: str | None) -> None:
    """Raise `ValueError` for an unknown kind of object."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind {quote(kind)} is none of {', '.join(KINDS)}")
