"""Copies of objects from store to store; each is verified when it is read, and never replaces another.

A store that is to travel is a directory without tenant, secret and keys, whichever store was exported into
it. Canonicals may be put into codes on the way; patches of another form are left behind then, since a patch
also corrects the losses of the form that it was formed against.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kamera.errors import UnknownChunk
from kamera.store.admin.raw import RawObjects
from kamera.store.codec import UNREADABLE
from kamera.store.info import ObjectInfo, Progress
from kamera.store.keys import PATCH_KINDS, KVForm, check_form
from kamera.store.records import CanonicalRecord, Record, to_store_form
from kamera.store.store import ChunkStore

_COUNTED = ("canonicals", "patches", "encodings", "anchors", "present")
_REFUSALS = (*UNREADABLE, ValueError, OSError)


@dataclass(frozen=True)
class Copied:
    """The outcome of a copy.

    ``canonicals``, ``patches``, ``encodings``, ``anchors``: numbers of those that are new.
    ``present``: number of those that the target had already, which stayed unchanged. ``loss``: the largest
    relative error of a canonical that was put into codes (None: there is none). ``refused``: one line, name
    and reason, for each of the others.
    """

    canonicals: int
    patches: int
    encodings: int
    anchors: int
    present: int
    loss: float | None
    refused: tuple[str, ...]


def copy(
    source: ChunkStore,
    target: ChunkStore | str | os.PathLike[str],
    chunks: Sequence[str] | None,
    kv: KVForm | None,
    progress: Progress,
) -> Copied:
    """`StoreAdmin.copy`."""
    if kv is not None:
        check_form(kv)
    if kv == "as-is":
        raise ValueError("codes do not become again what the model computed: give kv='int8' or 'int4'")
    infos = _choose(source, chunks, kv)
    if isinstance(target, ChunkStore):
        return _copy(source, target, infos, kv, progress)
    with ChunkStore.open(target) as target_store:
        return _copy(source, target_store, infos, kv, progress)


def _is_same(source: ChunkStore, target: ChunkStore) -> bool:
    """True if both are the same tenant's objects in the same place."""
    disks = [None if store._tiers.remote else store._tiers.disk for store in (source, target)]
    if disks[0] is not None and disks[1] is not None:
        same_place = os.path.samefile(disks[0].root, disks[1].root)
    else:
        same_place = source.url == target.url and (source is target or source._tiers.remote is not None)
    return same_place and source.tenant == target.tenant


def _choose(store: ChunkStore, chunks: Sequence[str] | None, kv: KVForm | None) -> list[ObjectInfo]:
    """All objects but what single windows kept; or those of some chunks, and their anchors."""
    infos = [info for info in store.ls() if info.kind != "conditioned"]
    if kv is not None:
        infos = [info for info in infos if info.kind not in PATCH_KINDS or info.context.kv == kv]
    if chunks is None:
        return infos
    chunk_ids = set(chunks)
    missing_ids = chunk_ids - {info.chunk_id for info in infos if info.kind == "canonical"}
    if missing_ids:
        raise UnknownChunk(f"no chunk {min(missing_ids)!r} in {store!r}: nothing was copied")
    mine = [i for i in infos if i.chunk_id in chunk_ids and chunk_ids.issuperset(i.antecedents)]
    contexts = {replace(i.context, kv="as-is") for i in mine}
    return [*mine, *(i for i in infos if i.kind == "anchor" and i.context in contexts)]


def _copy(
    source: ChunkStore,
    target: ChunkStore,
    infos: Sequence[ObjectInfo],
    kv: KVForm | None,
    progress: Progress,
) -> Copied:
    if _is_same(source, target):
        raise ValueError(f"{source.url} would be copied into itself: give another store")
    counts: Counter[str] = Counter()
    refused = dict(_unlisted_names(source))
    losses: list[float] = []
    for number, info in enumerate(infos, 1):
        try:
            record = source._look_up(info.key)
            if record is not None:  # it may have been deleted since it was listed
                counts[_put(target, record, kv, losses)] += 1
        except _REFUSALS as error:
            refused[info.key] = str(error)
        progress(number, len(infos))
    return Copied(
        **{kind: counts[kind] for kind in _COUNTED},
        loss=max(losses, default=None),
        refused=tuple(f"{name!r}: {why}" for name, why in sorted(refused.items())),
    )


def _unlisted_names(source: ChunkStore) -> Iterator[tuple[str, str]]:
    """Names in the source whose headers cannot be read, with the reason; no listing tells of them."""
    listed_names = {info.key for info in source.ls()}
    for name in RawObjects(source).names():
        try:
            if name not in listed_names:
                source._tiers.info(name)  # another tenant's, unless it raises an error
        except _REFUSALS as error:
            yield name, str(error)


def _put(target: ChunkStore, record: Record, kv: KVForm | None, losses: list[float]) -> str:
    """Store a record as the target's tenant's, and return the counter to raise."""
    context = replace(record.context, tenant=target.tenant)
    needs_codes = kv is not None and record.kind == "canonical" and record.context.kv != kv
    if needs_codes and context.lossy:
        raise ValueError(f"it is in {context.kv} already, and codes of codes lose twice")
    record = replace(record, context=replace(context, kv=kv) if kv and needs_codes else context)
    if target._tiers.stored_names([target._codec.name(record.key)]):
        return "present"
    loss = None
    if needs_codes and isinstance(record, CanonicalRecord):
        record = to_store_form(record)
        loss = 0.0 if record.loss is None else record.loss.relative
    [put] = target._put_many([record], replace=False)
    if put.error is not None:
        raise put.error
    if not put.stored:  # another writer was faster
        return "present"
    if loss is not None:
        losses.append(loss)
    return "patches" if record.kind in PATCH_KINDS else f"{record.kind}s"
