"""`ChunkStore`: objects in memory, a directory and a remote, addressed by all that a KV depends on."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np

from kamera import forks
from kamera.errors import (
    CorruptChunk,
    IncompatibleChunk,
    KameraError,
    RemoteUnavailable,
    StoreClosed,
    StoreError,
    quote,
)
from kamera.files import user_path
from kamera.ops import digest
from kamera.store.crypt import codec_of
from kamera.store.directory import Directory, PutOrder
from kamera.store.format import Codec
from kamera.store.index import Row, Stamped, selects
from kamera.store.keys import (
    KINDS,
    PATCH_KINDS,
    Context,
    KVForm,
    canonical_key,
    check_form,
    check_kind,
    encoding_context,
    home_of,
    object_key,
)
from kamera.store.memory import BY_AGE, Memory, MemoryStats, parse_size
from kamera.store.metrics import Metrics
from kamera.store.records import (
    CanonicalRecord,
    EncodingRecord,
    Held,
    ObjectInfo,
    PatchRecord,
    Record,
    base_of,
    detach,
)
from kamera.store.remote import SCHEMES, Remote, RemoteStats, Uploads, is_remote, open_remote
from kamera.store.search import Hit, LookBack, Query
from kamera.trust import outranks

logger = logging.getLogger(__name__)

WORKERS = 8
"""Most puts to a remote in progress at once: each has an object's bytes."""
CLOSE_SECONDS = 10.0
"""Seconds that `ChunkStore.close` waits for objects that the remote does not have yet."""

_PARTS = ("_memory", "_disk", "_remote", "_uploads", "_pins", "_search")  # of an open store
_R = TypeVar("_R", CanonicalRecord, PatchRecord, EncodingRecord)


class Put(NamedTuple):
    """What became of a record that was put: its key, and the error that refused it, if any.

    ``stored``: False if an object that was there already is kept instead.
    """

    key: str
    error: Exception | None
    stored: bool = False


@dataclass(frozen=True)
class FlushReport:
    """Names of the objects that the remote does not have yet. Both empty: all that was put is safe there.

    ``unsaved`` objects wait: in the cache directory, where they survive and are sent when the store is next
    opened, or, without one, in memory only. ``dropped`` objects found no room in memory and are lost.
    """

    unsaved: tuple[str, ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class StoreStats:
    """This tenant's objects in a store's ``directory`` (else in memory), and counters of its tiers."""

    url: str
    canonicals: int
    patches: int
    encodings: int
    anchors: int
    bytes: int
    memory: MemoryStats
    remote: RemoteStats | None = None
    directory: bool = False
    conditioned: int = 0

    @property
    def objects(self) -> int:
        """Number of objects of all kinds."""
        return self.canonicals + self.patches + self.encodings + self.anchors + self.conditioned


class ChunkStore:
    """Canonicals, patches, encodings and anchors of one tenant; open it with `ChunkStore.open`.

    `StoreAdmin` does its upkeep.

    Every record it returns is verified to the last byte and on the CPU; the tensors may be shared with
    other callers and must not be written in place. `put` copies its record first, so the caller may
    go on writing to its own. Safe to use from several threads, and a directory from several
    processes. A forked child must open the store again: its parent's raises `ForkedStore` there.

    Errors: `IncompatibleChunk` for another tenant's context, `CorruptChunk` for a damaged object
    (moved to ``quarantine/``; the next look-up is a miss), `StoreVersionError` for an object of a
    newer format, `StoreError` when the operating system or the index refuses.
    """

    def __init__(
        self,
        url: str,
        codec: Codec,
        tenant: str,
        memory_limit: int,
        disk: Directory | None = None,
        remote: Remote | None = None,
        kv: KVForm = "as-is",
        metrics: Metrics | None = None,
    ) -> None:
        self.url = url
        self.kv = kv
        self.tenant = tenant
        self.metrics = metrics
        self.awaited: dict[int, Callable[[], None]] = {}  # what still puts objects, by owner: see `close`
        self._codec = codec
        self._name: Callable[[str], str] = str if type(codec) is Codec else codec.name  # of a key
        self._disk = disk
        self._remote = remote
        self._limit = memory_limit
        self._turns: weakref.WeakValueDictionary[str, threading.RLock] = weakref.WeakValueDictionary()
        self._turning = threading.Lock()
        self._uploads = Uploads(self._send)
        self._dropped: dict[str, None] = {}
        self._ahead: dict[str, Record | None] = {}  # being read ahead; records that no tier here has kept
        # with a directory, memory may evict a pending object: it is read again
        self._memory = Memory(memory_limit, self._uploads if disk is None else ())
        # all tenants' in a directory; with a remote its own, which all its clients honour
        self._pins = (remote or disk or self._memory).pins
        self._search = LookBack(self)
        if disk is not None and remote is not None:
            disk.evict_over_limit()
            mine = codec.seal_id(tenant)
            unsent = [r for r in disk.index.rows() if r.tenant == mine and r.sent != r.stamp]
            for row in sorted(unsent, key=BY_AGE):  # put by a killed process, or offline
                self._uploads.add(row.key)
        if metrics is not None:
            metrics.watch(self)
        forks.call_in_child(self, _in_child)

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str],
        *,
        memory_limit: int | str = "4GiB",
        tenant: str = "",
        secret: bytes | str | None = None,
        keys: Sequence[bytes] = (),
        cache: str | os.PathLike[str] | None = None,
        disk_limit: int | str | None = None,
        read_only: bool = False,
        kv: KVForm = "as-is",
        metrics: Metrics | None = None,
    ) -> ChunkStore:
        """Open, or make, the store at a directory, ``file://…``, ``memory://`` or a remote.

        Remotes are ``redis://``, ``rediss://``, ``valkey://``, ``redis+unix://``, ``s3://``, ``gs://``
        and ``obstore+file://`` (`docs/stores.md`). While one is down, look-ups miss and put objects wait:
        in memory, or in the directory ``cache``, which also keeps fetched objects, up to ``disk_limit``
        bytes.

        For a directory ``disk_limit`` bounds the bytes of its objects: the least recently used leave
        before a put, pinned objects stay, and a put for which that leaves no room raises `StoreFull`. With
        ``read_only``, and in any directory that cannot be written, look-ups and listings work, and a call
        that would change it raises `StoreReadOnly`.

        ``memory_limit`` bounds the records kept decoded, in bytes or as ``"512MiB"``; for
        ``memory://`` it bounds the store itself, and an evicted object is a miss. With a ``secret`` (16
        bytes or more) the tenant's objects have names and digests that nobody else can make, in a
        directory of their own; ``keys`` (32 bytes each, the one to write with first) encrypt them:
        `docs/stores.md`. ``kv`` is the form in which windows on this store keep canonicals: in codes of 8 or
        4 bits they take a half or a third of their bf16 bytes, and are never served as ``exact``
        (docs/stores.md). ``metrics`` counts the outcomes of look-ups for Prometheus
        (docs/stores.md). Raises `StoreError` for another scheme or a directory that holds something
        else, `StoreVersionError` for a newer store (left untouched), `ValueError` for a limit that is no
        size, or a secret or keys too short.
        """
        check_form(kv)
        codec = codec_of(tenant, secret, keys)
        most = parse_size(memory_limit, "memory_limit")
        limit = None if disk_limit is None else parse_size(disk_limit, "disk_limit")
        remote = open_remote(url, codec, tenant) if isinstance(url, str) and is_remote(url) else None
        if cache is not None and remote is None:
            raise ValueError(f"cache is for a remote store, and {str(url)!r} is none")
        if remote is not None and read_only:
            raise ValueError("read_only is for a directory store, and this is a remote")
        if remote is not None and cache is None and limit is not None:
            raise ValueError(f"disk_limit={disk_limit!r} bounds a cache: give cache=DIRECTORY as well")
        if url == "memory://" and (limit is not None or read_only):
            raise ValueError("disk_limit and read_only are for a directory, and 'memory://' is none")
        disk = None
        if remote is not None and cache is not None:
            disk = Directory(user_path(cache), codec, limit=limit, cached=remote.url)
        elif remote is None and url != "memory://":
            disk = Directory(_path_of(url), codec, read_only=read_only, limit=limit)
        where = remote.url if remote is not None else "memory://" if disk is None else str(_path_of(url))
        return cls(where, codec, tenant, most, disk, remote, kv, metrics)

    def get_canonical(self, context: Context, chunk_id: str) -> CanonicalRecord | None:
        """The canonical of a chunk under ``context``; None is a miss."""
        return self._get(CanonicalRecord, self._object_name(context, chunk_id))

    def get_anchor(self, context: Context) -> CanonicalRecord | None:
        """The KV of the anchor of ``context``, as the model computed it, even if the context has codes."""
        context = replace(context, kv="as-is")
        return self._get(CanonicalRecord, self._object_name(context, context.anchor, None, "anchor"))

    def get_encoding(self, vision: str, chunk_id: str) -> EncodingRecord | None:
        """The encoding of a chunk by the tower, projector and processor whose fingerprint is ``vision``."""
        context = encoding_context(vision, self.tenant)
        return self._get(EncodingRecord, self._object_name(context, chunk_id, None, "encoding"))

    def get_patch(
        self,
        context: Context,
        chunk_id: str,
        antecedents: Sequence[str],
        kind: str = "exact",
        base: str = "",
    ) -> PatchRecord | None:
        """The patch of a chunk behind ``antecedents``: this order, or for ``"orbit"`` this set.

        ``base``: the anchor of the canonical to which it is added, if that is not the context's own.
        """
        return self._get(PatchRecord, self._object_name(context, chunk_id, antecedents, kind, base))

    def put(self, record: Record) -> str:
        """Store an object and return its key. A patch replaces the one under its key, other kinds do not.

        A patch that was formed behind stronger KV (`PatchRecord.formed`) stays, whoever puts last.

        A canonical is kept in its context's form: raises `ValueError` for a KV that has no codes (not
        finite), if its context has them.
        """
        [put] = self.put_many([record])
        if put.error is not None:
            raise put.error
        return put.key

    def put_many(self, records: Sequence[Record]) -> list[Put]:
        """`put` of each of ``records``, written together; what became of each, in their order.

        An error is that of its own record: the others are stored. But a canonical is refused together with
        its encoding, and a patch with its canonical, if that is in the batch, too. In a directory a batch has
        one lock, one transaction in the index and one sync of names, after which it survives a loss of
        power. A writer that is interrupted leaves the old or the new object of each: first
        encodings, then canonicals, then patches.
        """
        start = time.perf_counter()
        puts = self._put_many(records)
        if self.metrics is not None:
            self.metrics.time("kamera_store_put_seconds", time.perf_counter() - start)
        return puts

    def has(
        self,
        context: Context,
        chunk_id: str,
        antecedents: Sequence[str] | None = None,
        kind: str | None = None,
        base: str = "",
    ) -> bool:
        """True if there is an object to look up; nothing is read. The arguments are those of `info`."""
        key = self._object_name(context, chunk_id, antecedents, kind, base)
        is_present = self._has_here(key) or bool(self._remote is not None and self._stored_names([key]))
        if self.metrics is not None:
            self._count_look(self.metrics, is_present)
        return is_present

    def info(
        self,
        context: Context,
        chunk_id: str,
        antecedents: Sequence[str] | None = None,
        kind: str | None = None,
        base: str = "",
    ) -> ObjectInfo | None:
        """The info of a stored object, by its header alone: no tensor is read.

        The object is of ``kind`` (`keys.KINDS`); by default the canonical, with ``antecedents`` the patch.
        """
        key = self._object_name(context, chunk_id, antecedents, kind, base)
        info = self._info(key)
        if self.metrics is not None:
            self._count_look(self.metrics, info is not None)
        return info

    def look(self, context: Context, keys: Iterable[str]) -> dict[str, ObjectInfo | Exception | None]:
        """The infos of objects by their keys, or the errors that `info` of them would raise.

        A remote is asked once, for all of them.
        """
        if context.tenant != self.tenant:
            self._check(context)
        found, missing = dict[str, ObjectInfo | Exception | None](), dict[str, str]()
        for key in keys:
            try:
                found[key] = self._info_here(name := self._name(key))
            except (KameraError, OSError) as error:
                found[key] = error
            else:
                if found[key] is None and self._remote is not None:
                    missing[name] = key
        if missing and self._remote is not None:
            with contextlib.suppress(RemoteUnavailable):
                for name, info in self._remote.look(list(missing)).items():
                    found[missing[name]] = info
        if self.metrics is not None:
            for info in found.values():
                if not isinstance(info, Exception):
                    self._count_look(self.metrics, info is not None)
        return found

    def contexts_of(self, chunk_id: str) -> list[Context]:
        """The contexts of this tenant under which a chunk's canonical is stored.

        After a miss they distinguish "never seen" from "made by another backbone or anchor".
        """
        return [info.context for info in self.ls("canonical", chunk_id=chunk_id)]

    def ls(
        self,
        kind: str | None = None,
        *,
        chunk_id: str | None = None,
        context: Context | None = None,
        limit: int | None = None,
        offset: int = 0,
        here: bool = False,
    ) -> list[ObjectInfo]:
        """This tenant's objects, oldest first; ``kind`` is one of `keys.KINDS`, or None for all.

        ``chunk_id`` and ``context`` select those of one chunk and of one context; at most ``limit`` are
        listed, after the first ``offset``. ``here``, and while it is down: the remote is not asked.
        """
        if context is not None:
            self._check(context)
        check_kind(kind)
        remote = None if here else self._remote
        if self._disk is not None and remote is None:
            return list(self._disk.index.iterate(self.tenant, kind, chunk_id, context, limit, offset))
        near = self._memory.infos(chunk_id) if self._disk is None else self._disk.index.iterate(self.tenant)
        infos = {info.key: info for info in near}
        try:
            for info in [] if remote is None else remote.infos():
                infos.setdefault(info.key, info)
        except RemoteUnavailable as error:
            logger.debug("only what is here is listed: %s", error)
        listed = [i for i in sorted(infos.values(), key=BY_AGE) if selects(i, kind, chunk_id, context)]
        return listed[offset:][:limit]

    @property
    def has_remote(self) -> bool:
        """True if objects may be on another machine (`read_ahead`); a closed store has none."""
        return not isinstance(self._remote, forks.Gone) and self._remote is not None

    @contextlib.contextmanager
    def read_ahead(self, infos: Sequence[ObjectInfo]) -> Iterator[None]:
        """Context in which objects come from the remote, several at once, while the caller goes on.

        As many of them come, in order, as half of the memory limit holds. Objects of a directory stay there:
        reading them ahead saves no time. Nothing is raised here: reading a damaged or missing object raises
        as always. A read waits for an object that is on its way.
        """
        room, names = self._memory.limit // 2, list[str]()
        for info in infos if self._remote is not None else ():
            room -= info.bytes
            if room < 0:
                break
            if not self._has_here(info.key) and self._memory.peek(info.key) is None:
                names.append(info.key)
        remote = self._remote
        if not names or remote is None:
            yield
            return

        def read(name: str) -> None:
            # an error is raised by the read that needs the object
            with contextlib.suppress(KameraError, OSError), self._alone([name]):
                if name in self._ahead:  # else that read came first
                    self._fetch(name, remote, is_ahead=True)

        self._ahead.update(dict.fromkeys(names))
        pool = ThreadPoolExecutor(min(WORKERS, len(names)), thread_name_prefix="kamera-reads")
        try:
            for name in names:
                pool.submit(read, name)
            yield
        finally:
            pool.shutdown(cancel_futures=True)
            for name in names:
                self._ahead.pop(name, None)

    def flush(self, timeout: float | None = None) -> FlushReport:
        """Wait until the remote has all that was put, at most ``timeout`` seconds; report those it lacks.

        A store without a remote has nothing to wait for. `close` does this too, for a few seconds.
        """
        return FlushReport(self._uploads.flush(timeout), tuple(self._dropped))

    def search(self, query: Query, k: int = 5, *, context: Context) -> list[Hit]:
        """The ``k`` stored chunks under ``context`` whose pictures look most like ``query``, best first.

        ``query`` is a stored chunk or its id (which is then no hit), or a vector of vision features.
        Raises `UnknownChunk` for a chunk without a stored embedding, `ValueError` for a vector that
        does not fit. See docs/stores.md.
        """
        self._check(context)
        return self._search.ask(context, query, k)

    def embedding(self, context: Context, chunk_id: str) -> np.ndarray | None:
        """Mean vision features of a stored chunk, ``[width]`` at length 1; None without pictures."""
        self._check(context)
        return self._search.embedding(context, chunk_id)

    def close(self) -> None:
        """Release memory and index; any later use of the store raises `StoreClosed`.

        What is ``awaited`` is called first: windows still have chunks to archive.
        """
        if isinstance(self._memory, forks.Gone):
            return
        for flush in list(self.awaited.values()):
            flush()
        self._search.close()
        unsaved = self._uploads.flush(CLOSE_SECONDS, patient=False)
        self._uploads.close()
        if unsaved and self._disk is None:
            logger.error("closed with %d objects that never reached the remote: they are lost", len(unsaved))
        elif unsaved:
            logger.warning("%d objects will be uploaded when the store is next opened", len(unsaved))
        self._memory.clear()
        for tier in self._below_memory:
            tier.close()
        refusal = StoreClosed(f"the store {self.url!r} is closed: open it again with ChunkStore.open")
        for part in _PARTS:
            setattr(self, part, forks.Gone(refusal))

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        tenant = f", tenant={self.tenant!r}" if self.tenant else ""
        kv = "" if self.kv == "as-is" else f", kv={self.kv!r}"
        return f"ChunkStore({self.url!r}, memory_limit={self._limit}{tenant}{kv})"

    def _check(self, context: Context) -> None:
        if context.tenant != self.tenant:
            raise IncompatibleChunk(
                f"context of tenant {quote(context.tenant)} in a store opened for {quote(self.tenant)}: "
                f"open the store with tenant={quote(context.tenant)}"
            )

    def _get(self, cls: type[_R], name: str) -> _R | None:
        record = self._look_up(name)
        assert record is None or isinstance(record, cls)
        return record

    def _look_up(self, name: str) -> Record | None:
        """The object ``name`` from the nearest tier that has it, counted."""
        if self.metrics is None:
            return self._find(name)
        start = time.perf_counter()
        try:
            record = self._find(name)
        except KameraError as error:
            self.metrics.count_miss(time.perf_counter() - start, False, error)
            raise
        if record is None:
            self.metrics.count_miss(time.perf_counter() - start, self._remote_is_down())
        else:
            self.metrics.count("kamera_store_hits", record.kind)
            self.metrics.time("kamera_store_get_seconds", time.perf_counter() - start, "hit")
        return record

    def _count_look(self, metrics: Metrics, is_present: bool) -> None:
        answer = "there" if is_present else "remote_dead" if self._remote_is_down() else "absent"
        metrics.count("kamera_store_asked", answer)

    def _remote_is_down(self) -> bool:
        return self._remote is not None and self._remote.stats().reads != "closed"

    def _put_many(self, records: Sequence[Record], *, replace: bool = True) -> list[Put]:
        puts: dict[int, Put] = {}
        orders: dict[int, PutOrder] = {}
        for i, record in enumerate(records):
            try:
                self._check(record.context)
                home = home_of(record.kind, record.context, record.chunk_id, base_of(record))
                name, needs = (key and self._name(key) for key in (record.key, home))
                orders[i] = PutOrder(name, record, replace and record.kind in PATCH_KINDS, needs)
            except (KameraError, ValueError) as error:
                puts[i] = Put("", error)
        for turn in _batches(orders):
            results = dict(zip(turn, self._put_orders([orders[i] for i in turn]), strict=True))
            for i, result in results.items():
                refusal = result if isinstance(result, Exception) else None
                is_stored = result is not None and refusal is None
                puts[i] = Put(orders[i].name, refusal, is_stored)
                record = orders[i].record
                if is_stored and self._search.is_asked and isinstance(record, CanonicalRecord):
                    self._search.add(orders[i].name, record)
        return [puts[i] for i in range(len(records))]

    def _object_name(
        self,
        context: Context,
        chunk_id: str,
        antecedents: Sequence[str] | None = None,
        kind: str | None = None,
        base: str = "",
    ) -> str:
        """The name of the object of ``kind``.

        By default that is the canonical, or with ``antecedents`` (even empty) the patch.
        """
        if context.tenant != self.tenant:
            self._check(context)
        kind = kind or ("canonical" if antecedents is None else "exact")
        if kind == "canonical":  # asked for most often, and its key is remembered
            return self._name(canonical_key(context, chunk_id))
        return self._name(object_key(kind, context, chunk_id, antecedents or (), base))

    # -- objects by name, in one to three tiers ------------------------------------------------

    @property
    def _below_memory(self) -> list[Directory | Remote]:
        """Those below memory, the nearest first."""
        return [tier for tier in (self._disk, self._remote) if tier is not None]

    def _find(self, name: str) -> Record | None:
        """The object ``name`` from the nearest tier that has it."""
        if self._disk is None and self._remote is None:
            return self._memory.get(name)
        damage = None
        try:
            record = self._local(name)
        except CorruptChunk as error:  # set aside by now; the remote may have a good one
            record, damage = None, error
        if record is None and self._remote is not None:
            with self._alone([name]):
                record = self._fetch(name, self._remote)
        if record is None and damage is not None:
            raise damage
        return record

    def _put_orders(self, orders: Sequence[PutOrder]) -> list[Record | Exception | None]:
        """Store a copy of each record, and return it; None if a stored one is kept, an error that is its own.

        The names differ, and the orders come by their rank.
        """
        results: dict[str, Record | Exception | None] = {}
        batch: list[PutOrder] = []
        for order in orders:
            try:
                if not order.replace and self._is_kept(order.name):
                    results[order.name] = None
                else:
                    batch.append(order._replace(record=detach(order.record)))
            except KameraError as error:
                results[order.name] = error
        with self._alone([order.name for order in batch]):
            if self._disk is None:
                self._put_without_disk(batch, results)
            else:
                self._put_on_disk(self._disk, batch, results)
        return [results[order.name] for order in orders]

    def _stored_names(self, names: Sequence[str]) -> set[str]:
        """Those of ``names`` that `get` would find, unread; the remote is asked once, for all not here."""
        hits = {name for name in names if self._has_here(name)}
        misses = [name for name in names if name not in hits]
        try:
            return hits | self._remote.names_with_blob(misses) if self._remote is not None else hits
        except RemoteUnavailable:
            return hits

    def _info(self, name: str, *, certain: bool = False) -> ObjectInfo | None:
        """The info of the object ``name``. ``certain``: raise `RemoteUnavailable` rather than guess."""
        info = self._info_here(name)
        if info is not None or self._remote is None:
            return info
        try:
            return self._remote.info(name)
        except RemoteUnavailable:
            if certain:
                raise
            return None

    def _infos_of(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """The infos of these objects; the remote is asked once. Raises `RemoteUnavailable`."""
        infos = {name: self._info_here(name) for name in names}
        misses = [name for name, info in infos.items() if info is None]
        if self._remote is not None:
            infos.update(zip(misses, self._remote.infos_of(misses), strict=True))
        return [infos[name] for name in names]

    def _rows(self, *, every_tenant: bool = False) -> list[Row]:
        """The rows of the objects: of the remote if there is one, else of the directory, or of memory."""
        if self._remote is None and self._disk is not None:
            return list(self._disk.index.rows(None if every_tenant else self.tenant))
        infos = self._memory.infos() if self._remote is None else self._remote.infos()
        return [Row.of(info, self._codec) for info in infos]

    def _delete(self, names: Sequence[str]) -> None:
        """Remove objects from every tier; raises `RemoteUnavailable`, and then removes none."""
        with self._alone(names):
            if self._remote is not None and names:
                self._remote.delete(names)
            for name in names:
                self._uploads.discard(name)
                if self._disk is not None:
                    self._disk.delete(name)
                self._memory.drop(name)

    def _remove_unpinned(self, rows: Sequence[Row]) -> list[bool]:
        """Remove objects that are neither pinned (by any client) nor replaced by now; return which."""
        with self._pins.alone():  # pinning waits, so that an acknowledged pin is seen here
            pinned = self._pins.names_to_keep()
            if self._remote is not None:
                self._delete([row.key for row in rows if row.key not in pinned])
                return [row.key not in pinned for row in rows]
            assert self._disk is not None
            outcomes = [row.key not in pinned and self._disk.delete(row.key, row.stamp) for row in rows]
        for row in rows:
            self._memory.drop(row.key)  # it is read again if it stayed
        return outcomes

    def _stats(self) -> StoreStats:
        """Counts and bytes, and the counters of memory and remote."""
        if self._disk is None:
            sizes = {kind: [i.bytes for i in self._memory.infos() if i.kind == kind] for kind in KINDS}
            kinds = {kind: (len(sizes[kind]), sum(sizes[kind])) for kind in KINDS}
        else:
            kinds = self._disk.index.kinds(self.tenant)
        remote = self._remote
        return StoreStats(
            url=self.url,
            canonicals=kinds["canonical"][0],
            patches=sum(kinds[kind][0] for kind in PATCH_KINDS),
            encodings=kinds["encoding"][0],
            anchors=kinds["anchor"][0],
            conditioned=kinds["conditioned"][0],
            bytes=sum(size for _, size in kinds.values()),
            memory=self._memory.stats(),
            remote=None if remote is None else replace(remote.stats(), pending=len(self._uploads.names())),
            directory=self._disk is not None,
        )

    @contextlib.contextmanager
    def _alone(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, no other thread brings or removes these objects."""
        with self._turning:  # each has a lock while one waits for it or holds it
            turns = [self._turns.setdefault(name, threading.RLock()) for name in sorted(set(names))]
        with contextlib.ExitStack() as stack:
            for turn in turns:
                stack.enter_context(turn)
            yield

    def _local(self, name: str) -> Record | None:
        if self._disk is None:
            return self._memory.get(name)
        # asking the file each time costs microseconds, and shows the changes of other processes at once
        stamp = self._disk.stamp(name, is_use=True)
        record = self._memory.get(name, stamp)
        if record is not None or stamp is None:
            return record
        found = self._disk.read(name)
        if found is None:
            return None
        self._memory.put(found)
        return found.record

    def _is_kept(self, name: str) -> bool:
        # the remote is not asked: an object that it lists may still turn out damaged
        return self._memory.peek(name) is not None if self._disk is None else self._disk.is_intact(name)

    def _has_here(self, name: str) -> bool:
        """True if the object is in the directory, or without one in memory."""
        if self._disk is None:
            return self._memory.peek(name) is not None
        return self._disk.stamp(name) is not None

    def _info_here(self, name: str) -> ObjectInfo | None:
        stamp = None if self._disk is None else self._disk.stamp(name)  # a header is read only once
        if self._disk is not None and stamp is None:
            return None
        held = self._memory.peek(name, stamp)
        return held.info if held is not None else None if self._disk is None else self._disk.info(name)

    def _fetch(self, name: str, remote: Remote, *, is_ahead: bool = False) -> Record | None:
        if self._has_here(name):  # fetched while this call waited
            return self._local(name)
        ahead = None if is_ahead else self._ahead.pop(name, None)
        if ahead is not None:
            return ahead
        try:
            found = remote.read(name)
        except RemoteUnavailable:
            return None
        if found is None:
            return None
        record = found.record
        if self._disk is None:
            if not self._memory.put(found) and is_ahead:
                self._ahead[name] = record
            return record
        [result] = self._disk.put_many([PutOrder(name, record, False, file=(found.info, [found.data]))])
        if isinstance(result, Exception):  # such as no room: the object is served all the same
            logger.warning("%s is not cached: %s", name, result)
            if is_ahead:
                self._ahead[name] = record
        elif result is not None:  # else an intact one stays there
            self._disk.index.note_sent(name, result[1])
            self._disk.evict_over_limit()
            self._memory.put(Held(record, *result))
        return record

    def _put_on_disk(
        self, disk: Directory, orders: Sequence[PutOrder], results: dict[str, Record | Exception | None]
    ) -> None:
        batch = [order for order in orders if not order.is_refused(results)]
        outcomes: list[Stamped | Exception | None] = disk.put_many(batch) if batch else []
        for order, result in zip(batch, outcomes, strict=True):
            if result is None or isinstance(result, Exception):
                results[order.name] = result
                continue
            results[order.name] = order.record
            self._memory.put(Held(order.record, *result))
            if self._remote is not None:
                self._uploads.add(order.name)

    def _put_without_disk(
        self, orders: Sequence[PutOrder], results: dict[str, Record | Exception | None]
    ) -> None:
        """Put to the remote, several of a rank at once; without a remote, into memory."""
        for _, wave in itertools.groupby(orders, key=lambda order: order.rank):
            batch = [order for order in wave if not order.is_refused(results)]
            if self._remote is None or len(batch) < 2:
                wave_results = [self._put_away(order) for order in batch]
            else:  # round trips overlap
                with ThreadPoolExecutor(min(WORKERS, len(batch)), thread_name_prefix="kamera-puts") as pool:
                    wave_results = list(pool.map(self._put_away, batch))
            results.update(zip((order.name for order in batch), wave_results, strict=True))

    def _put_away(self, order: PutOrder) -> Record | Exception | None:
        """Put to the remote, or into memory until it can be sent."""
        name, record = order.name, order.record
        created, held = round(time.time(), 3), self._memory.peek(name)
        try:
            info = self._codec.describe(record, created, record.nbytes)
            if held is not None and outranks(held.info.formed, info.formed):
                return None
            if self._remote is None:
                self._memory.put(Held(record, info))
                return record
            data = self._codec.encode(record, created)
            info = replace(info, bytes=len(data))
            self._dropped.pop(name, None)
            if not self._remote.put(info, data):
                return None
        except RemoteUnavailable as error:
            self._uploads.add(name)  # before it is in memory, so that it is held from the start
            if not self._memory.put(Held(record, info)):
                self._uploads.discard(name)
                self._dropped[name] = None
                logger.error("%s is not kept, memory is full of what waits for the remote (%s)", name, error)
        except (KameraError, ValueError) as error:
            return error
        else:
            self._uploads.discard(name)
            self._memory.put(Held(record, info))
        return record

    def _send(self, name: str) -> None:
        """Bring one object to the remote. Raises `RemoteUnavailable`, `CorruptChunk`, `StoreError`."""
        assert self._remote is not None
        with self._alone([name]):
            if self._disk is None:
                held = self._memory.peek(name)
                if held is not None:
                    data = self._codec.encode(held.record, held.info.created)
                    if not self._remote.put(held.info, data):
                        self._memory.drop(name)
                return
            found = self._disk.read(name, whole=True)  # verified, so that no damage travels
            if found is None:
                return
            if not self._remote.put(found.info, found.data):
                self._disk.delete(name, found.stamp)  # the next look-up fetches the stronger one
                return
            self._disk.index.note_sent(name, found.stamp)
        self._disk.evict_over_limit()


def find_conditioned(
    store: ChunkStore, context: Context, chunk_id: str, antecedents: Sequence[str], content: str
) -> CanonicalRecord | None:
    """The KV of a chunk behind ``antecedents`` whose content has this digest; None is a miss."""
    context = replace(context, kv="as-is")
    name = store._object_name(context, chunk_id, antecedents, "conditioned", content)
    return store._get(CanonicalRecord, name)


def stored_keys(store: ChunkStore, keys: Iterable[str]) -> set[str]:
    """Those of ``keys`` that a look-up would find; nothing is read, and a remote is asked once."""
    keys_by_name = {store._codec.name(key): key for key in keys}
    return {keys_by_name[name] for name in store._stored_names(list(keys_by_name))}


def signature(store: ChunkStore, text: str) -> str:
    """A digest of a text and the store's tenant; with a secret, one that only who holds it can make."""
    return store._codec.sign(digest("kamera.sign.v1", store.tenant, text))


def check_store(store: object) -> None:
    """Raise ValueError for what is no `ChunkStore`."""
    if not isinstance(store, ChunkStore):
        raise ValueError(f"{quote(store)} is no ChunkStore: open one with ChunkStore.open")


def memory_of(store: ChunkStore) -> MemoryStats:
    """What a store holds in memory, and its look-ups there."""
    return store._memory.stats()


def _in_child(store: ChunkStore) -> None:
    """A child has none of the store's threads, and must not touch its connections."""
    forks.make_unusable(store, *_PARTS, "metrics")


def _batches(orders: dict[int, PutOrder]) -> Iterable[list[int]]:
    """The numbers of the orders by their rank: one batch, or more if an object is ordered twice."""
    rest = sorted(orders, key=lambda i: orders[i].rank)
    while rest:
        first = {orders[i].name: i for i in reversed(rest)}
        yield [i for i in rest if first[orders[i].name] == i]
        rest = [i for i in rest if first[orders[i].name] != i]


def _path_of(url: str | os.PathLike[str]) -> Path:
    """The directory that a store's url names. Raises `StoreError` for another url."""
    if not isinstance(url, str) or "://" not in url:
        return user_path(url)
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise StoreError(
            f"cannot open {quote(url)}: give a directory, file:///directory, memory://, or one of "
            + ", ".join(f"{scheme}://" for scheme in SCHEMES)
        )
    return Path(unquote(parts.path))
