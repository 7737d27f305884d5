"""`ChunkStore`: objects in memory, a directory and a remote, addressed by all that a KV depends on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from kamera import forks
from kamera.errors import IncompatibleChunk, KameraError, quote
from kamera.ops import digest
from kamera.store.closed import Closed
from kamera.store.codec import Codec
from kamera.store.digests import DigestName, hasher_of
from kamera.store.encoding import EncodingRecord
from kamera.store.info import FlushReport, MemoryStats, ObjectInfo, Put, Selection, StoreStats
from kamera.store.keys import (
    PATCH_KINDS,
    Context,
    KVForm,
    check_form,
    encoding_context,
    home_of,
    object_key,
)
from kamera.store.listing import stats
from kamera.store.metrics import Counters, Metrics
from kamera.store.opening import open_tiers
from kamera.store.orders import PutOrder, put_batches
from kamera.store.quantities import parse_size
from kamera.store.records import CanonicalRecord, PatchRecord, Record, base_of
from kamera.store.seal.tenants import codec_of
from kamera.store.search import Hit, LookBack, Query
from kamera.store.tiers import Tiers

_R = TypeVar("_R", CanonicalRecord, PatchRecord, EncodingRecord)


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
        tiers: Tiers,
        tenant: str,
        codec: Codec,
        kv: KVForm = "as-is",
        metrics: Counters | None = None,
    ) -> None:
        self.url = url
        self.kv = kv
        self.tenant = tenant
        self.metrics = Counters() if metrics is None else metrics
        self.awaited: dict[int, Callable[[], None]] = {}  # what still puts objects, by owner: see `close`
        self._codec = codec
        self._tiers = tiers
        self._disk = tiers.disk
        self._memory = tiers.memory
        self._limit = tiers.memory.limit
        self._search = LookBack(tiers, codec)
        self.metrics.watch(self)
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
        digest: DigestName = "sha256",
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
        `docs/stores.md`. ``digest`` is the hash by which written objects are verified: those under
        ``"blake3"`` are read at three times the speed, wherever ``kamera-kv[blake3]`` is installed.
        ``kv`` is the form in which windows on this store keep canonicals: in codes of 8 or 4 bits they
        take a half or a third of their bf16 bytes, and are never served as ``exact``
        (docs/stores.md). ``metrics`` counts the outcomes of look-ups for Prometheus
        (docs/stores.md). Raises `StoreError` for another scheme or a directory that holds something
        else, `StoreVersionError` for a newer store (left untouched), `ValueError` for a limit that is no
        size, or a secret or keys too short.
        """
        check_form(kv)
        hasher_of(digest)
        codec = replace(codec_of(tenant, secret, keys), digest=digest)
        limit = parse_size(memory_limit, "memory_limit")
        where, tiers = open_tiers(url, codec, tenant, limit, cache, disk_limit, read_only)
        return cls(where, tiers, tenant, codec, kv, metrics)

    def get_canonical(self, context: Context, chunk_id: str) -> CanonicalRecord | None:
        """The canonical of a chunk under ``context``; None is a miss."""
        return self._get(CanonicalRecord, context, self._object_name(context, chunk_id))

    def get_anchor(self, context: Context) -> CanonicalRecord | None:
        """The KV of the anchor of ``context``, as the model computed it, even if the context has codes."""
        context = replace(context, kv="as-is")
        return self._get(CanonicalRecord, context, self._object_name(context, context.anchor, None, "anchor"))

    def get_encoding(self, vision: str, chunk_id: str) -> EncodingRecord | None:
        """The encoding of a chunk by the tower, projector and processor whose fingerprint is ``vision``."""
        context = encoding_context(vision, self.tenant)
        return self._get(EncodingRecord, context, self._object_name(context, chunk_id, None, "encoding"))

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
        return self._get(PatchRecord, context, self._object_name(context, chunk_id, antecedents, kind, base))

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
        one lock, one transaction in the index and at most three syncs (docs/stores.md), after which it
        survives a loss of power. A writer that is interrupted leaves the old or the new object of each: first
        encodings, then canonicals, then patches.
        """
        start = time.perf_counter()
        puts = self._put_many(records)
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
        is_present = bool(self._tiers.stored_names([key]))
        self._count_look(is_present)
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
        info = self._tiers.info(key)
        self._count_look(info is not None)
        return info

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
        listed, after the first ``offset``. ``here``: a remote is not asked.
        """
        if context is not None:
            self._check(context)
        return self._tiers.infos(Selection(kind, chunk_id, context, limit, offset), here=here)

    def flush(self, timeout: float | None = None) -> FlushReport:
        """Wait until the remote has all that was put, at most ``timeout`` seconds; report those it lacks.

        A store without a remote has nothing to wait for. `close` does this too, for a few seconds.
        """
        return self._tiers.flush(timeout)

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
        if isinstance(self._tiers, Closed):
            return
        for flush in list(self.awaited.values()):
            flush()
        self._search.close()
        self._tiers.close()
        stand_in: Any = Closed(self.url)
        self._tiers = self._disk = self._memory = self._search = stand_in

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

    def _stats(self) -> StoreStats:
        return stats(self._tiers, self.tenant, self.url)

    def _check(self, context: Context) -> None:
        if context.tenant != self.tenant:
            raise IncompatibleChunk(
                f"context of tenant {quote(context.tenant)} in a store opened for {quote(self.tenant)}: "
                f"open the store with tenant={quote(context.tenant)}"
            )

    def _get(self, cls: type[_R], context: Context, name: str) -> _R | None:
        record = self._look_up(name)
        assert record is None or isinstance(record, cls)
        return record

    def _look_up(self, key: str) -> Record | None:
        start = time.perf_counter()
        try:
            record = self._tiers.get(key)
        except KameraError as error:
            self.metrics.count_miss(time.perf_counter() - start, False, error)
            raise
        if record is None:
            self.metrics.count_miss(time.perf_counter() - start, self._remote_is_down())
            return None
        self.metrics.count("kamera_store_hits", record.kind)
        self.metrics.time("kamera_store_get_seconds", time.perf_counter() - start, "hit")
        return record

    def _count_look(self, is_present: bool) -> None:
        answer = "there" if is_present else "remote_dead" if self._remote_is_down() else "absent"
        self.metrics.count("kamera_store_asked", answer)

    def _remote_is_down(self) -> bool:
        remote = self._tiers.remote
        return remote is not None and remote.stats().reads != "closed"

    def _put_many(self, records: Sequence[Record], *, replace: bool = True) -> list[Put]:
        puts: dict[int, Put] = {}
        orders: dict[int, PutOrder] = {}
        for i, record in enumerate(records):
            try:
                self._check(record.context)
                home = home_of(record.kind, record.context, record.chunk_id, base_of(record))
                name, needs = (key and self._codec.name(key) for key in (record.key, home))
                orders[i] = PutOrder(name, record, replace and record.kind in PATCH_KINDS, needs)
            except (KameraError, ValueError) as error:
                puts[i] = Put("", error)
        for turn in put_batches(orders):
            results = dict(zip(turn, self._tiers.put_many([orders[i] for i in turn]), strict=True))
            for i, result in results.items():
                refusal = result if isinstance(result, Exception) else None
                is_stored = result is not None and refusal is None
                puts[i] = Put(orders[i].name, refusal, is_stored)
                record = orders[i].record
                if is_stored and isinstance(record, CanonicalRecord):
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
        self._check(context)
        kind = kind or ("canonical" if antecedents is None else "exact")
        return self._codec.name(object_key(kind, context, chunk_id, antecedents or (), base))


def stored_keys(store: ChunkStore, keys: Iterable[str]) -> set[str]:
    """Those of ``keys`` that a look-up would find; nothing is read, and a remote is asked once."""
    keys_by_name = {store._codec.name(key): key for key in keys}
    return {keys_by_name[name] for name in store._tiers.stored_names(list(keys_by_name))}


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
    forks.make_unusable(store, "_tiers", "_disk", "_memory", "_search", "metrics")
