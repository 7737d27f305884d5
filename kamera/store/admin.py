"""`StoreAdmin`: verify a store, keep or remove its objects, and copy them to another one."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kamera.errors import (
    CorruptChunk,
    ForeignKey,
    RemoteUnavailable,
    StoreError,
    StoreVersionError,
    UnknownChunk,
    WrongKey,
)
from kamera.store.directory import Directory, Quarantined, leaving
from kamera.store.format import UNREADABLE, Codec
from kamera.store.index import Row
from kamera.store.keys import (
    KINDS,
    PATCH_KINDS,
    Context,
    KVForm,
    behind_survivors,
    check_form,
    check_kind,
    home_of,
    is_key,
    object_key,
    whole_id,
)
from kamera.store.memory import Pins, parse_size
from kamera.store.records import CanonicalRecord, ObjectInfo, Record, to_store_form
from kamera.store.remote import Remote
from kamera.store.store import ChunkStore, StoreStats

Progress = Callable[[int, int], None]
"""Called with the number of objects done, and their total."""

_REMOTE = "remote/"  # prefix of the ``file`` of a copy in a remote
_COPY_NAME = re.compile(rf"({_REMOTE})?[0-9a-f]{{64}}(\.\d{{1,20}}(\.safetensors)?)?")
_AT_ONCE = 256  # objects that leave after one look at the pins: one round trip, if a service supports that
_COUNTED = ("canonicals", "patches", "encodings", "anchors", "present")
_REFUSALS = (*UNREADABLE, ValueError, OSError)


def ignore_progress(done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Census:
    """A tenant's objects, counted by kind and by form of the KV; the numbers of their chunks and contexts.

    A chunk counts if any object of it is there; an anchor is no chunk. Contexts are those of models, not
    of vision towers. ``kinds`` and ``forms``: ``objects``, and their ``bytes`` as stored.
    """

    kinds: dict[str, dict[str, int]]
    chunks: int
    contexts: int
    forms: dict[str, dict[str, int]]


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of reading every object once.

    ``ok``: objects whose every byte is as it was written. ``quarantined``: one line per damaged
    object, now out of the store. ``refused``: one line per object that was left in place because
    this version, or this caller, cannot read it. ``orphan_files``: objects the index did not list, and
    lists now. ``orphan_rows``: rows without an object, now gone. ``stale``: files of writers that
    died, now gone.
    """

    ok: int
    quarantined: tuple[str, ...]
    refused: tuple[str, ...]
    orphan_files: int = 0
    orphan_rows: int = 0
    stale: int = 0


@dataclass(frozen=True)
class Collected:
    """Report of `StoreAdmin.gc`: objects found and objects removed; after a dry run, those it would remove.

    ``removed``: ``key``, ``kind``, ``bytes`` and ``used`` (the last use, seconds since 1970) of each.
    ``leftovers``: files of dead writers that were removed. ``quarantined``: copies in quarantine that
    were removed, which is only done on request.
    """

    objects_before: int
    bytes_before: int
    objects_after: int
    bytes_after: int
    removed: tuple[Row, ...]
    leftovers: int = 0
    quarantined: int = 0


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


class StoreAdmin:
    """Upkeep of a `ChunkStore`, for its tenant unless a method says otherwise; closed with the store.

    Errors are those of the store: `StoreClosed`, `ForkedStore`, `StoreReadOnly`, `StoreError` when the
    operating system or the index refuses, `RemoteUnavailable` if the answer needs the remote.
    """

    def __init__(self, store: ChunkStore) -> None:
        self.store = store

    # -- contents ------------------------------------------------------------------------------

    @property
    def codec(self) -> Codec:
        """The store's codec, which decodes bytes into objects and rejects all others."""
        return self.store._codec

    def names(self) -> list[str]:
        """All names, also of unreadable objects; a directory's of all tenants. Raises `RemoteUnavailable`."""
        store = self.store
        held = [] if store._below_memory else [info.key for info in store._memory.infos()]
        return sorted({*held, *(name for tier in store._below_memory for name in tier.names())})

    def read(self, name: str) -> Record | None:
        """The object ``name`` (a row's ``key``) of any kind; otherwise as the store's look-ups."""
        return self.store._look_up(name)

    def load(self, name: str) -> bytes | None:
        """The bytes of one object, unverified; None if there is none. A dead remote is an error, no miss."""
        disk, remote = self.store._disk, self.store._remote
        data = None if disk is None else disk.load(name)
        return remote.load(f"objects/{name}") if data is None and remote is not None else data

    def reach(self) -> None:
        """Raise `RemoteUnavailable` if there is a remote and it does not answer."""
        try:
            if self.store._remote is not None:
                self.store._remote.reach()
        except RemoteUnavailable as error:
            raise RemoteUnavailable(f"{self.store.url} does not answer: {error}") from error

    def census(self, kind: str | None = None) -> Census:
        """Objects counted by kind, form, chunk and context; no object is read, nor in a directory listed."""
        check_kind(kind)
        rows = [row for row in self.store._rows() if kind in (None, row.kind)]
        models = (row for row in rows if row.kind not in ("anchor", "encoding"))
        forms = {row.kv: self.store._codec.open_id(row.kv) for row in rows}
        return Census(
            kinds={
                one: _count([row.bytes for row in rows if row.kind == one])
                for one in (KINDS if kind is None else (kind,))
            },
            forms={
                said: _count([row.bytes for row in rows if row.kv == kv])
                for kv, said in sorted(forms.items())
            },
            chunks=len({row.chunk_id for row in rows if row.kind != "anchor"}),
            contexts=len({(row.fingerprint, row.anchor, row.kv) for row in models}),
        )

    def stats(self) -> StoreStats:
        """Counts and bytes of objects, and the counters of memory and remote."""
        return self.store._stats()

    # -- integrity -----------------------------------------------------------------------------

    def verify(self, *, progress: Progress = ignore_progress) -> VerifyReport:
        """Read every object of the directory, of all tenants; damaged ones go to quarantine.

        Files left by dead writers are removed, and the indices, that of look-back search included, are
        rebuilt from the files. ``progress`` is called with the objects done and their total.
        """
        store = self.store
        report = VerifyReport(0 if store._below_memory else len(store._memory.infos()), (), ())
        if store._disk is not None:
            stale = 0 if store._disk.read_only else store._disk.remove_leftovers()
            listed, names = store._disk.index.keys(), set(store._disk.names())
            store._disk.index.rebuild()
            report = replace(
                report, orphan_files=len(names - listed), orphan_rows=len(listed - names), stale=stale
            )
        for tier in store._below_memory:
            report = _verified(tier, report, progress)
        self.store._search.rebuild({info.context for info in self.store.ls("canonical", here=True)})
        return report

    def rebuild_index(self) -> int:
        """Rebuild the directory's index from the files; return the number of objects it lists."""
        disk = self.store._disk
        return len(self.store._memory.infos()) if disk is None else disk.index.rebuild()

    def quarantined(self) -> list[Quarantined]:
        """All damaged copies: of the directory, of all tenants, then this tenant's in the remote.

        A sound one can be moved back by hand.
        """
        copies = [(tier, copy) for tier in self.store._below_memory for copy in tier.copies()]
        remote = self.store._remote
        return [replace(c, file=_REMOTE + c.file) if tier is remote else c for tier, c in copies]

    def drop_quarantined(self, name: str) -> int:
        """Delete one copy (by its ``file``) or all of the object ``name``; return their number."""
        if not _COPY_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is neither an object's name nor that of a copy in quarantine")
        files = [copy.file for copy in self.quarantined() if name in (copy.file, copy.name)]
        for file in files:
            tier = self.store._remote if file.startswith(_REMOTE) else self.store._disk
            assert tier is not None
            tier.delete_copy(file.removeprefix(_REMOTE))
        return len(files)

    # -- keeping and removing objects ----------------------------------------------------------

    def keys_of(self, targets: str | Iterable[str]) -> list[str]:
        """Keys of objects of this tenant: of ``targets`` each is a key, or a chunk's id for all its objects.

        The beginning of either is enough. Raises `UnknownChunk` for one that names nothing here,
        `AmbiguousId` for the beginning of several.
        """
        names = [targets] if isinstance(targets, str) else list(targets)
        infos = self.store._infos_of([name for name in names if is_key(name)])
        own = {i.key for i in infos if i is not None and i.context.tenant == self.store.tenant}
        rows = [] if own.issuperset(names) else self.store.ls()
        ids, keys = [name for row in rows for name in (row.key, row.chunk_id)], list[str]()
        for name in names:
            whole = name if name in own else whole_id(name, ids, "object or chunk")
            keys += [name] if name in own else [r.key for r in rows if whole in (r.key, r.chunk_id)]
        return list(dict.fromkeys(keys))

    def pin(self, targets: str | Iterable[str], ttl: float | str | None = None) -> None:
        """Keep the objects of ``targets`` (`keys_of`) through `gc`; all or none.

        ``ttl``: seconds, or text such as ``"12h"``; None: for good. A chunk's are those that it has now.
        Raises `PinsFull` over the store's cap (`pins`), `UnknownChunk` for what is not stored,
        `RemoteUnavailable`. Pins of a remote are stored beside its objects, and every client's `gc` honours
        them; pins in ``memory://`` are this process's.
        """
        names = self.keys_of(targets)
        infos = {name: info for name, info in zip(names, self.store._infos_of(names), strict=True) if info}
        homes = {
            name: self.store._codec.name(home)
            for name, info in infos.items()
            if (home := home_of(info.kind, info.context, info.chunk_id, info.base))
        }
        self.pins.pin([(name, info.bytes) for name, info in infos.items()], ttl, homes)
        remote, pending = self.store._remote, self.store._uploads.names()  # first: one may arrive meanwhile
        # someone may have collected it before the pin was there
        present = self.store._stored_names(names) if remote is None else remote.names_with_blob(names)
        lost = set(names) - present - set(pending)
        if lost:
            self.pins.unpin(names)
            raise StoreError(f"{self.store.url} has lost {min(lost)} meanwhile: nothing was pinned")

    def unpin(self, targets: str | Iterable[str]) -> int:
        """Unpin objects of this tenant (`keys_of`), or objects that are gone; the number that were pinned."""
        pinned, mine = [pin.name for pin in self.pins.list()], list[str]()
        for target in [targets] if isinstance(targets, str) else targets:
            names = [name for name in pinned if name.startswith(target)]
            try:
                mine += names if len(names) == 1 else self.keys_of(target)
            except UnknownChunk:
                if not is_key(target):
                    raise  # else its object is gone, with its pin or without
        if self.store._disk is not None and self.store._remote is None:  # its pins are of all tenants
            mine = [key for key in mine if self._own_info(key) is not None or self.store._info(key) is None]
        return self.pins.unpin(mine)

    @property
    def pins(self) -> Pins:
        """The store's pins: all tenants' in a directory, this tenant's in a remote, else this process's."""
        return self.store._pins

    def delete(self, key: str) -> bool:
        """Remove one object; return True if it existed. Raises `ValueError` if ``key`` is not a key."""
        info = self._own_info(key)
        if info is None:
            return False
        self.store._delete([key])
        with contextlib.suppress(StoreError):  # a pin of a removed object keeps nothing
            self.unpin([key])
        self.store._search.forget([key])
        return True

    def gc(
        self,
        max_bytes: int | str | None = None,
        *,
        every_tenant: bool = False,
        quarantine_age: float | None = None,
        dry_run: bool = False,
        progress: Progress = ignore_progress,
    ) -> Collected:
        """Make this tenant's objects take at most ``max_bytes``, also as ``"20GiB"``.

        Pinned objects stay. Of the rest, the least recently used are removed first, a canonical after its
        patches and an encoding after its canonicals, and any patch whose canonical is gone is removed.
        ``every_tenant``: all objects of the directory, within one budget. ``quarantine_age``: also
        quarantined copies older than this (seconds), of all tenants. ``dry_run``: only report the objects to
        remove. ``progress`` is called with objects removed and to remove. In a remote the oldest leave first:
        uses are not counted there. Raises `StoreError` for ``memory://``, which has its own limit, and for a
        remote's cache opened without the remote.
        """
        limit = None if max_bytes is None else parse_size(max_bytes)
        url, store = self.store.url, self.store
        if store._remote is not None and every_tenant:
            raise StoreError(f"{url} keeps tenants apart: collect for each of them")
        if not store._below_memory:
            raise StoreError(f"cannot collect in {url}: bound it by opening it with memory_limit=")
        self._refuse_cache("collect", ", or bound the cache by opening it with disk_limit=")
        leftovers = 0 if store._disk is None or dry_run else store._disk.remove_leftovers()
        rows, removed = store._rows(every_tenant=every_tenant), list[Row]()
        victims = list(leaving(rows, store._pins.names_to_keep(), limit))
        for start in range(0, len(victims), _AT_ONCE):
            batch = victims[start : start + _AT_ONCE]
            outcomes = [True] * len(batch) if dry_run else store._remove_unpinned(batch)
            removed += [row for row, is_gone in zip(batch, outcomes, strict=True) if is_gone]
            progress(start + len(batch), len(victims))
        oldest = time.time() - (quarantine_age or 0.0)
        copies = [] if quarantine_age is None else self.quarantined()
        files = [copy.file for copy in copies if copy.when < oldest]
        if not dry_run:
            self.store._search.forget([one.key for one in removed])
        before = sum(row.bytes for row in rows)
        return Collected(
            objects_before=len(rows),
            bytes_before=before,
            objects_after=len(rows) - len(removed),
            bytes_after=before - sum(one.bytes for one in removed),
            removed=tuple(removed),
            leftovers=leftovers,
            quarantined=len(files) if dry_run else sum(map(self.drop_quarantined, files)),
        )

    def forget(self, chunk_id: str) -> Forgotten:
        """Remove everything made of a chunk (including patches of others formed behind it, and damaged
        copies), check again, and report the remains.

        Patches behind survivors go, too: they do not name all they absorbed. ``chunk_id`` may be the start of
        an id if it fits one chunk only; else `UnknownChunk` or `AmbiguousId` is raised. A whole id without
        an object gives a report without ``removed``. Raises `RemoteUnavailable` when a remote does not
        answer; run it again then. Raises `StoreError` for a remote's cache opened without the remote, for
        which it cannot answer.
        """
        self._refuse_cache("forget")
        store = self.store
        if store._disk is not None:
            store._disk.index.rebuild()
        if not is_key(chunk_id):
            rows = [info for info in store.ls() if info.context.tenant == store.tenant]
            ids = (chunk for row in rows for chunk in (row.chunk_id, *row.antecedents))
            chunk_id = whole_id(chunk_id, ids, "chunk")
        look = _Look(store, chunk_id)
        traces = [trace for trace in look.traces() if trace.certain]
        removed = sorted({trace.name for trace in traces if trace.tier is None})
        store._delete(removed)
        for trace in traces:
            if trace.tier is not None:
                trace.tier.delete_copy(trace.copy)
        look.names.update(trace.name for trace in traces)  # the header of a copy may be gone
        self.store._search.forget(look.names)
        store._pins.unpin(look.names)
        warning = None if store._disk is None else store._disk.index.erase_deleted()
        return Forgotten(
            chunk_id=chunk_id,
            removed=tuple(removed),
            copies=sum(trace.tier is not None for trace in traces),
            left=tuple(dict.fromkeys([*(trace.where for trace in look.traces()), *filter(None, [warning])])),
        )

    # -- copies ---------------------------------------------------------------------------------

    def copy(
        self,
        target: ChunkStore | str | os.PathLike[str],
        chunks: Sequence[str] | None = None,
        *,
        kv: KVForm | None = None,
        progress: Progress = ignore_progress,
    ) -> Copied:
        """Copy objects into ``target`` as its tenant's, or into a plain store at that url, made if missing.

        Every object is verified first, and none replaces another; the report lists those refused. ``chunks``
        (ids): only those, with the patches whose antecedents are all among them. ``kv`` (``"int8"``,
        ``"int4"``): canonicals in codes, without patches of another form, since a patch also corrects the
        losses of the form that it was formed against; what is in other codes is refused by name: codes of
        codes lose twice. ``progress`` is called with the objects done and their total. Raises `UnknownChunk`
        for a chunk that is not stored, `ValueError` for a form without codes, and for a copy into itself.
        """
        if kv is not None:
            check_form(kv)
        if kv == "as-is":
            raise ValueError("codes do not become again what the model computed: give kv='int8' or 'int4'")
        infos = self._chosen(chunks, kv)
        if not isinstance(target, ChunkStore):
            with ChunkStore.open(target) as opened:
                return self._copy(opened, infos, kv, progress)
        return self._copy(target, infos, kv, progress)

    def _chosen(self, chunks: Sequence[str] | None, kv: KVForm | None) -> list[ObjectInfo]:
        """All objects but what single windows kept; or those of some chunks, and their anchors."""
        infos = [info for info in self.store.ls() if info.kind != "conditioned"]
        if kv is not None:
            infos = [info for info in infos if info.kind not in PATCH_KINDS or info.context.kv == kv]
        if chunks is None:
            return infos
        chunk_ids = set(chunks)
        missing = chunk_ids - {info.chunk_id for info in infos if info.kind == "canonical"}
        if missing:
            raise UnknownChunk(f"no chunk {min(missing)!r} in {self.store!r}: nothing was copied")
        mine = [i for i in infos if i.chunk_id in chunk_ids and chunk_ids.issuperset(i.antecedents)]
        contexts = {replace(i.context, kv="as-is") for i in mine}
        return [*mine, *(i for i in infos if i.kind == "anchor" and i.context in contexts)]

    def _copy(
        self, target: ChunkStore, infos: Sequence[ObjectInfo], kv: KVForm | None, progress: Progress
    ) -> Copied:
        source = self.store
        if _is_same(source, target):
            raise ValueError(f"{source.url} would be copied into itself: give another store")
        counts: Counter[str] = Counter()
        refused = dict(self._unlisted())
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

    def _unlisted(self) -> Iterator[tuple[str, str]]:
        """Names whose headers cannot be read, with the reason; no listing tells of them."""
        listed = {info.key for info in self.store.ls()}
        for name in self.names():
            try:
                if name not in listed:
                    self.store._info(name)  # another tenant's, unless it raises an error
            except _REFUSALS as error:
                yield name, str(error)

    # -- inside ---------------------------------------------------------------------------------

    def _own_info(self, key: str) -> ObjectInfo | None:
        """The description of ``key`` if it is this tenant's. Raises `ValueError` if it is not a key."""
        if not is_key(key):
            raise ValueError(f"{key!r} is no key: 64 lower-case hex digits")
        info = self.store._info(key, certain=True)
        return None if info is None or info.context.tenant != self.store.tenant else info

    def _refuse_cache(self, verb: str, else_: str = "") -> None:
        """Raise `StoreError` if this is a remote's cache directory, opened without the remote."""
        disk = self.store._disk
        url = None if disk is None or self.store._remote else disk.caches
        if disk is not None and url is not None:
            raise StoreError(
                f"{disk.root} is the cache of {url}: open that with this as cache= (--cache) to {verb}{else_}"
            )


class _Trace(NamedTuple):
    """A place where the chunk is, or may be (not ``certain``); ``tier`` and ``copy``: in quarantine."""

    where: str
    name: str
    certain: bool = True
    tier: Directory | Remote | None = None
    copy: str = ""


class _Look:
    """A search through all places, and then another; ``names`` are those of the chunk's objects so far."""

    def __init__(self, store: ChunkStore, chunk_id: str) -> None:
        self.names: set[str] = set()
        self._store = store
        self._chunk_id = chunk_id
        self._contexts: set[Context] = set()

    def traces(self) -> Iterator[_Trace]:
        """The places of the chunk, objects first: their names help to find the rest."""
        store = self._store
        for info in store._memory.infos():
            if self._is_of(info):
                yield _Trace(f"object {info.key} in memory", info.key)
        if store._remote is not None:
            infos = list(store._remote.infos(afresh=True))
            reasons = dict.fromkeys(set(store._remote.names()) - {info.key for info in infos}, "")
            yield from self._below(store._remote, f"{store._remote.url} ", infos, reasons)
        if store._disk is not None:
            reasons = self._unreadable(store._disk)
            yield from self._below(store._disk, "", store._disk.index.iterate(store.tenant), reasons)
            for path in store._disk.unfinished():
                name = path.rpartition("/")[2]
                if name in self.names:
                    yield _Trace(f"tmp/{path}, which is being written", name, certain=False)

    def _below(
        self, tier: Directory | Remote, at: str, infos: Iterable[ObjectInfo], reasons: Mapping[str, str]
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

    def _unreadable(self, disk: Directory) -> dict[str, str]:
        """The objects that cannot be read, with why; damaged ones go to quarantine, others have rows."""
        if not disk.read_only:
            disk.remove_leftovers()  # files left by dead writers
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
        if info.context.tenant != self._store.tenant:
            return False
        own = info.context
        if own not in self._contexts:
            self._contexts.add(own)
            kinds = ("canonical",) if own.anchor or own.lossy else ("canonical", "encoding")
            self.names |= {self._store._codec.name(object_key(kind, own, self._chunk_id)) for kind in kinds}
        is_named = self._chunk_id in (info.chunk_id, *info.antecedents)
        if not is_named and not behind_survivors(info.antecedents):  # these do not name all they absorbed
            return False
        self.names.add(info.key)
        return True


def _count(sizes: Sequence[int]) -> dict[str, int]:
    return {"objects": len(sizes), "bytes": sum(sizes)}


def _verified(tier: Directory | Remote, report: VerifyReport, progress: Progress) -> VerifyReport:
    """Read every object of ``tier``, and add to ``report``."""
    ok, damaged = 0, list[str]()
    refused = [] if isinstance(tier, Directory) else tier.strangers()
    names = tier.names()
    for number, name in enumerate(names, 1):
        try:
            ok += tier.read(name) is not None
        except (StoreVersionError, WrongKey, ForeignKey) as error:
            refused.append(str(error))
        except CorruptChunk as error:
            damaged.append(str(error))
        progress(number, len(names))
    return replace(
        report,
        ok=report.ok + ok,
        quarantined=(*report.quarantined, *damaged),
        refused=(*report.refused, *refused),
    )


def _is_same(source: ChunkStore, target: ChunkStore) -> bool:
    """True if both are the same tenant's objects in the same place."""
    disks = [None if store._remote else store._disk for store in (source, target)]
    if disks[0] is not None and disks[1] is not None:
        same_place = os.path.samefile(disks[0].root, disks[1].root)
    else:
        same_place = source.url == target.url and (source is target or source._remote is not None)
    return same_place and source.tenant == target.tenant


def _put(target: ChunkStore, record: Record, kv: KVForm | None, losses: list[float]) -> str:
    """Store a record as the target's tenant's, and return the counter to raise."""
    context = replace(record.context, tenant=target.tenant)
    needs_codes = kv is not None and record.kind == "canonical" and record.context.kv != kv
    if needs_codes and context.lossy:
        raise ValueError(f"it is in {context.kv} already, and codes of codes lose twice")
    record = replace(record, context=replace(context, kv=kv) if kv and needs_codes else context)
    if target._stored_names([target._codec.name(record.key)]):
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
