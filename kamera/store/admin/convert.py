"""Conversion of a store's canonicals to codes, in another store: half the size as computed, or less.

Encodings and anchors are copied unchanged. Patches are left behind: each belongs to the KV form it was
formed against, and also corrects that form's losses.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kamera.errors import CorruptChunk, IncompatibleChunk, StoreVersionError, WrongKey
from kamera.store.info import Progress
from kamera.store.keys import PATCH_KINDS, KVForm, check_form
from kamera.store.records import CanonicalRecord, kept

if TYPE_CHECKING:
    from kamera.store.store import ChunkStore


@dataclass(frozen=True)
class Converted:
    """The outcome of a conversion.

    ``canonicals``: number coded; ``present``: number that the target had already. ``kv_before`` and
    ``kv_after``: KV bytes of those coded. ``loss``: the largest relative error of one of them (None: no
    canonical was coded). ``patches``: number left behind. ``refused``: one line for each refused canonical.
    """

    canonicals: int
    present: int
    kv_before: int
    kv_after: int
    loss: float | None
    patches: int
    refused: tuple[str, ...]


def convert(source: ChunkStore, target: ChunkStore, kv: KVForm, progress: Progress) -> Converted:
    """`StoreAdmin.convert`."""
    check_form(kv)
    if kv == "as-is":
        raise ValueError("codes do not become again what the model computed: give kv='int8' or 'int4'")
    if target.tenant != source.tenant:
        raise IncompatibleChunk(
            f"the target was opened for tenant {target.tenant!r}, the source for {source.tenant!r}"
        )
    listed = source.ls()
    chosen = [info for info in listed if info.kind == "canonical" and info.context.kv != kv]
    counts: Counter[str] = Counter()
    losses: list[float] = []
    refused: list[str] = []
    for info in listed:
        if info.kind in ("encoding", "anchor"):
            try:
                shared = source._look_up(info.key)
                if shared is not None:
                    target.put(shared)
            except (CorruptChunk, StoreVersionError, WrongKey) as error:
                refused.append(f"{info.key}: {error}")
    for done, info in enumerate(chosen, 1):
        if info.context.lossy:
            refused.append(f"{info.key}: it is in {info.context.kv} already, and codes of codes lose twice")
        else:
            try:
                record = source.get_canonical(info.context, info.chunk_id)
                if record is not None:  # it may have been deleted since it was listed
                    _bring(record, target, kv, counts, losses)
            except (CorruptChunk, StoreVersionError, WrongKey, ValueError) as error:
                refused.append(f"{info.key}: {error}")
        progress(done, len(chosen))
    return Converted(
        canonicals=counts["canonicals"],
        present=counts["present"],
        kv_before=counts["before"],
        kv_after=counts["after"],
        loss=max(losses, default=None),
        patches=sum(info.kind in PATCH_KINDS for info in listed),
        refused=tuple(refused),
    )


def _bring(
    record: CanonicalRecord, target: ChunkStore, kv: KVForm, counts: Counter[str], losses: list[float]
) -> None:
    context = replace(record.context, kv=kv)
    if target.has(context, record.chunk_id):
        counts["present"] += 1
        return
    coded = kept(replace(record, context=context))
    target.put(coded)
    counts["canonicals"] += 1
    counts["before"] += _kv_bytes(record)
    counts["after"] += _kv_bytes(coded)
    assert coded.loss is not None
    losses.append(coded.loss.relative)


def _kv_bytes(record: CanonicalRecord) -> int:
    return sum(t.numel() * t.element_size() for n, t in record.tensors().items() if n.startswith("kv/"))
