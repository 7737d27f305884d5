"""Forgetting a chunk: everything made of it is removed, and a second look reports the remains.

The index is compared with every file first, so that it agrees with the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kamera.errors import CorruptChunk, StoreVersionError, WrongKey
from kamera.store.codec import Codec
from kamera.store.disk.tier import DiskTier
from kamera.store.info import ObjectInfo
from kamera.store.keys import Context, behind_survivors, is_key, object_key, whole_id
from kamera.store.search import LookBack
from kamera.store.tiers import Lower, Tiers


@dataclass(frozen=True)
class Forgotten:
    """The objects removed with a chunk, and its remains.

    ``removed``: names of the removed objects. ``copies``: number of damaged copies removed from the
    quarantine. ``left``: one line for each place that still holds the chunk, or may hold it because it
    cannot be read. Empty: this store holds nothing of it.
    """

    chunk_id: str
    removed: tuple[str, ...]
    copies: int
    left: tuple[str, ...]


class _Trace(NamedTuple):
    """A place where the chunk is, or may be (not ``certain``); ``tier`` and ``copy``: in quarantine."""

    where: str
    name: str
    certain: bool = True
    tier: Lower | None = None
    copy: str = ""


def forget(tiers: Tiers, search: LookBack, codec: Codec, tenant: str, chunk_id: str) -> Forgotten:
    """`StoreAdmin.forget`. Patches behind survivors go, too: they do not name all they absorbed."""
    chunk_id = _whole(tiers, tenant, chunk_id)
    look = _Look(tiers, codec, tenant, chunk_id)
    traces = [trace for trace in look.traces() if trace.certain]
    removed = sorted({trace.name for trace in traces if trace.tier is None})
    tiers.delete(removed)
    for trace in traces:
        if trace.tier is not None:
            trace.tier.delete_copy(trace.copy)
    look.names.update(trace.name for trace in traces)  # the header of a copy may be gone
    search.forget(look.names)
    tiers.pins.unpin(look.names)
    warning = None if tiers.disk is None else tiers.disk.index.erase_deleted()
    return Forgotten(
        chunk_id=chunk_id,
        removed=tuple(removed),
        copies=sum(trace.tier is not None for trace in traces),
        left=tuple(dict.fromkeys([*(trace.where for trace in look.traces()), *filter(None, [warning])])),
    )


def _whole(tiers: Tiers, tenant: str, start: str) -> str:
    """The id that begins with ``start``; a whole id is accepted even if no object is of it."""
    if is_key(start):
        return start
    if tiers.disk is not None:
        tiers.disk.index.correct_all_rows()
    rows = (info for info in tiers.infos() if info.context.tenant == tenant)
    return whole_id(start, (chunk for info in rows for chunk in (info.chunk_id, *info.antecedents)), "chunk")


class _Look:
    """A search through all places, and then another; ``names`` are those of the chunk's objects so far."""

    def __init__(self, tiers: Tiers, codec: Codec, tenant: str, chunk_id: str) -> None:
        self.names: set[str] = set()
        self._has_compared = False  # the second look relies on the first one's comparison
        self._tiers = tiers
        self._codec = codec
        self._tenant = tenant
        self._chunk_id = chunk_id
        self._contexts: set[Context] = set()

    def traces(self) -> Iterator[_Trace]:
        """The places of the chunk, objects first: their names help to find the rest."""
        tiers = self._tiers
        for info in tiers.memory.infos():
            if self._is_of(info):
                yield _Trace(f"object {info.key} in memory", info.key)
        if tiers.remote is not None:
            infos = list(tiers.remote.listing.infos(afresh=True))
            reasons = dict.fromkeys(set(tiers.remote.names()) - {info.key for info in infos}, "")
            yield from self._below(tiers.remote, f"{tiers.remote.url} ", infos, reasons)
        if tiers.disk is not None:
            reasons = self._unreadable(tiers.disk)
            yield from self._below(tiers.disk, "", tiers.disk.index.iterate(tenant=self._tenant), reasons)
            for file, part_info in tiers.disk.list_unfinished().items():
                name = file.partition(".")[0]
                if name in self.names or (part_info is not None and self._is_of(part_info)):
                    yield _Trace(f"tmp/{file}, which is being written", name, certain=False)

    def _below(
        self, tier: Lower, at: str, infos: Iterable[ObjectInfo], reasons: Mapping[str, str]
    ) -> Iterator[_Trace]:
        """The places in one tier, ``at`` its address: objects, unreadable ones (``reasons``: why), copies."""
        for name, why in reasons.items():
            yield _Trace(f"{at}object {name} cannot be read{why}", name, certain=False)
        for info in infos:
            if self._is_of(info):
                yield _Trace(f"{at}object {info.key}", info.key)
        for copy in tier.copies():
            where, copy_info = f"{at}quarantine/{copy.file}", tier.copy_info(copy.file)
            if copy.name in self.names or (copy_info is not None and self._is_of(copy_info)):
                yield _Trace(where, copy.name, True, tier, copy.file)
            elif copy_info is None:
                yield _Trace(f"{where} cannot be read", copy.name, certain=False)

    def _unreadable(self, disk: DiskTier) -> dict[str, str]:
        """The objects that cannot be read, with why; damaged ones go to quarantine, others have rows."""
        if not disk.read_only:
            disk.remove_leftovers()  # files left by dead writers
        if not self._has_compared:
            disk.index.correct_all_rows()
            self._has_compared = True
        reasons = {}
        for name in set(disk.names()) - disk.index.keys():
            try:
                disk.info(name)
            except CorruptChunk:
                pass  # it is in quarantine now, and looked at there
            except (StoreVersionError, WrongKey) as error:
                reasons[name] = f": {error}"
        return reasons

    def _is_of(self, info: ObjectInfo) -> bool:
        if info.context.tenant != self._tenant:
            return False
        if info.context not in self._contexts:
            self._note(info.context)
        is_named = self._chunk_id in (info.chunk_id, *info.antecedents)
        if not is_named and not behind_survivors(info.antecedents):  # these do not name all they absorbed
            return False
        self.names.add(info.key)
        return True

    def _note(self, context: Context) -> None:
        self._contexts.add(context)
        kinds = ("canonical",) if context.anchor or context.lossy else ("canonical", "encoding")
        self.names.update(self._codec.name(object_key(kind, context, self._chunk_id)) for kind in kinds)
