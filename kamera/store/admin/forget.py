"""Forgetting a chunk: everything made of it is removed, and a second look reports the remains.

The index is compared with every file first, so that it agrees with the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kamera.errors import CorruptChunk, StoreVersionError, WrongKey
from kamera.store.codec import Codec
from kamera.store.disk.folder import Folder, NotAFile
from kamera.store.disk.tier import DiskTier
from kamera.store.info import ObjectInfo
from kamera.store.keys import Context, behind_survivors, is_key, object_key, whole_id
from kamera.store.remote import RemoteTier
from kamera.store.search.lookback import Search
from kamera.store.tiers import Tiers

_UNREADABLE = (CorruptChunk, StoreVersionError, WrongKey)


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
    """A place where the chunk is, or may be (``remove`` is None: nothing is removed there)."""

    where: str
    name: str
    remove: Callable[[], object] | None
    is_copy: bool = False


def forget(tiers: Tiers, search: Search, codec: Codec, tenant: str, chunk_id: str) -> Forgotten:
    """Remove a chunk's canonicals, encodings and patches, and the patches of others formed behind it.

    Every patch formed behind survivors is removed too: it does not name all the chunks it absorbed.

    Raises `UnknownChunk` and `AmbiguousId` for the start of an id that fits no chunk or several,
    `RemoteUnavailable` when a remote does not answer; run it again then.
    """
    chunk_id = _whole(tiers, tenant, chunk_id)
    look = _Look(tiers, codec, tenant, chunk_id)
    found = [trace for trace in look.traces() if trace.remove is not None]
    for trace in found:
        assert trace.remove is not None
        trace.remove()
    # by name as well: the header of a copy may be gone
    names = look.names | {trace.name for trace in found}
    search.forget(names)
    tiers.pins.unpin(names)
    unclean = tiers.scrub()
    look = _Look(tiers, codec, tenant, chunk_id, names)
    return Forgotten(
        chunk_id=chunk_id,
        removed=tuple(sorted({trace.name for trace in found if not trace.is_copy})),
        copies=sum(trace.is_copy for trace in found),
        left=tuple(dict.fromkeys([*(trace.where for trace in look.traces()), *unclean])),
    )


def _whole(tiers: Tiers, tenant: str, start: str) -> str:
    """The id that begins with ``start``; a whole id is accepted even if no object is of it."""
    if is_key(start):
        return start
    rows = (info for info in tiers.infos() if info.context.tenant == tenant)
    ids = {chunk for info in rows for chunk in (info.chunk_id, *info.antecedents)}
    if not any(chunk.startswith(start) for chunk in ids) and tiers.disk is not None:
        for name in tiers.disk.names():  # the index could be wrong about them
            with contextlib.suppress(*_UNREADABLE):
                header = tiers.disk.header(name)
                if header is not None and header["context"]["tenant"] == tenant:
                    ids.update((header["chunk_id"], *header.get("antecedents", ())))
    return whole_id(start, ids, "chunk")


class _Look:
    """One search through all places.

    ``names``: the known names of the chunk's objects: those found, and its canonicals and encodings under
    every context that the store has objects of.
    """

    def __init__(
        self,
        tiers: Tiers,
        codec: Codec,
        tenant: str,
        chunk_id: str,
        names: Iterable[str] = (),
    ) -> None:
        self.names = set(names)
        self._compared = bool(names)  # the second look relies on the first one's comparison
        self._tiers = tiers
        self._codec = codec
        self._tenant = tenant
        self._chunk_id = chunk_id
        self._contexts: set[Context] = set()

    def traces(self) -> Iterator[_Trace]:
        """The places of the chunk, objects first: their names help to find the rest."""
        yield from self._in_memory()
        if self._tiers.remote is not None:
            yield from self._in_remote(self._tiers.remote)
        if self._tiers.disk is not None:
            yield from self._on_disk(self._tiers.disk)

    def _in_memory(self) -> Iterator[_Trace]:
        for info in self._tiers.memory.infos():
            if self._is_of(info):
                yield self._object(f"object {info.key} in memory", info.key)

    def _on_disk(self, disk: DiskTier) -> Iterator[_Trace]:
        if not disk.read_only:
            disk.collect()  # files left by dead writers
        if not self._compared:
            disk.index.compare()  # now every readable file has a correct row
        for name in set(disk.names()) - disk.index.keys():
            try:
                disk.header(name)
            except CorruptChunk:
                with contextlib.suppress(*_UNREADABLE):
                    disk.read(name)  # quarantines it: it is looked at there
            except (StoreVersionError, WrongKey) as error:
                yield _Trace(f"object {name} cannot be read: {error}", name, None)
        for row in disk.index.of_chunk(self._chunk_id, self._tenant):
            if self._is_of(row):
                yield self._object(f"object {row.key}", row.key)
        for context in disk.index.contexts(self._tenant):
            self._note(context)
        with Folder.at(disk.root) as root:
            for folder in _subfolder(root, "quarantine"):
                for copy in disk.quarantined():
                    mine = self._header(folder, copy.file, copy.name)
                    drop = partial(disk.drop_quarantined, copy.file)
                    if mine:
                        yield _Trace(f"quarantine/{copy.file}", copy.name, drop, is_copy=True)
                    elif mine is None:
                        yield _Trace(f"quarantine/{copy.file} cannot be read", copy.name, None)
            for folder in _subfolder(root, "tmp"):
                for file in folder.names():
                    name = file.partition(".")[0]
                    if self._header(folder, file, name):
                        yield _Trace(f"tmp/{file}, which is being written", name, None)

    def _in_remote(self, remote: RemoteTier) -> Iterator[_Trace]:
        readable = {info.key: info for info in remote.infos(afresh=True)}
        for name in remote.names():
            info = readable.get(name)
            if info is None:
                yield _Trace(f"object {name} of {remote.url} cannot be read", name, None)
            elif self._is_of(info):
                yield self._object(f"object {name} of {remote.url}", name)
        for copy in remote.copies():
            name = copy.partition(".")[0]
            held = remote.copy_info(copy)
            where = f"{remote.url} quarantine/{copy}"
            if name in self.names or (held is not None and self._is_of(held)):
                yield _Trace(where, name, partial(remote.purge, copy), is_copy=True)
            elif held is None:
                yield _Trace(f"{where} cannot be read", name, None)

    def _object(self, where: str, name: str) -> _Trace:
        return _Trace(where, name, partial(self._tiers.delete, name))

    def _header(self, folder: Folder, file: str, name: str) -> bool | None:
        """True if a file set aside is of the chunk; None if it cannot be read."""
        if name in self.names:
            return True
        try:
            with (
                folder.reading(file) as (descriptor, status),
                open(descriptor, "rb", closefd=False) as opened,
            ):
                info = self._codec.read_info(opened, status.st_size, name, file)
        except FileNotFoundError:
            return False
        except (*_UNREADABLE, NotAFile):
            return None
        return self._is_of(info)

    def _is_of(self, info: ObjectInfo) -> bool:
        if info.context.tenant != self._tenant:
            return False
        if info.context not in self._contexts:
            self._note(info.context)
        named = self._chunk_id in (info.chunk_id, *info.antecedents)
        if not named and not behind_survivors(info.antecedents):  # these do not name all they absorbed
            return False
        self.names.add(info.key)
        return True

    def _note(self, context: Context) -> None:
        self._contexts.add(context)
        kinds = ("canonical",) if context.anchor or context.lossy else ("canonical", "encoding")
        self.names.update(self._codec.name(object_key(kind, context, self._chunk_id)) for kind in kinds)


def _subfolder(root: Folder, name: str) -> Iterator[Folder]:
    """The folder ``name`` of ``root``, if there is one."""
    with contextlib.suppress(FileNotFoundError), root.sub(name) as folder:
        yield folder
