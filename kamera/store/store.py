"""`ChunkStore`: a memory tier in front of a directory, addressed by what a KV depends on."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote, urlsplit

from kamera.errors import IncompatibleChunk, StoreError
from kamera.store.codec import Codec
from kamera.store.disk import DiskTier
from kamera.store.info import ObjectInfo, StoreStats, VerifyReport
from kamera.store.keys import KINDS, Context, canonical_key, is_key, patch_key
from kamera.store.memory import MemoryTier, parse_size
from kamera.store.records import CanonicalRecord, PatchRecord, RecordType, detached


class ChunkStore:
    """Canonicals and patches of one tenant. Open it with `ChunkStore.open`.

    What it returns is verified to the last byte and lies on the CPU; the tensors may be shared with
    other callers and must not be written in place. What is put is copied first, so the caller may
    go on writing to its own. Safe to use from several threads, and a directory from several
    processes.

    Errors: `IncompatibleChunk` for another tenant's context, `CorruptChunk` for a damaged object
    (moved to ``quarantine/``; the next look-up is a miss), `StoreVersionError` for an object of a
    newer format, `StoreError` when the operating system or the index refuses.
    """

    def __init__(
        self, url: str, disk: DiskTier | None, memory: MemoryTier, tenant: str, codec: Codec
    ) -> None:
        self.url = url
        self.tenant = tenant
        self._codec = codec
        self._disk = disk
        self._memory = memory

    @classmethod
    def open(
        cls, url: str | os.PathLike[str], *, memory_limit: int | str = "4GiB", tenant: str = ""
    ) -> ChunkStore:
        """Open, or make, the store at a directory, ``file://…`` or ``memory://``.

        ``memory_limit`` bounds the records kept decoded, in bytes or as ``"512MiB"``; for
        ``memory://`` it bounds the store itself, and what is evicted is a miss. Raises `StoreError`
        for another scheme or a directory that holds something else, `StoreVersionError` for a newer
        store (left untouched), `ValueError` for a limit that is no size.
        """
        memory = MemoryTier(parse_size(memory_limit))
        path = _path_of(url)
        codec = Codec()
        if path is None:
            return cls("memory://", None, memory, tenant, codec)
        return cls(str(path), DiskTier(path, codec), memory, tenant, codec)

    def get_canonical(self, context: Context, chunk_id: str) -> CanonicalRecord | None:
        """The canonical of a chunk under ``context``; None is a miss."""
        self._check(context)
        record = self._get(self._codec.name(canonical_key(context, chunk_id)))
        assert record is None or isinstance(record, CanonicalRecord)
        return record

    def put_canonical(self, record: CanonicalRecord) -> str:
        """Store a canonical and return its key. One that is there already is not written again."""
        return self._put(record, replace=False)

    def get_patch(
        self, context: Context, chunk_id: str, antecedents: Sequence[str], kind: str = "exact"
    ) -> PatchRecord | None:
        """The patch of a chunk behind ``antecedents``: this order, or for ``"orbit"`` this set."""
        self._check(context)
        record = self._get(self._codec.name(patch_key(context, chunk_id, antecedents, kind)))
        assert record is None or isinstance(record, PatchRecord)
        return record

    def put_patch(self, record: PatchRecord) -> str:
        """Store a patch, in place of the one under the same key, and return the key."""
        return self._put(record, replace=True)

    def has_canonical(self, context: Context, chunk_id: str) -> bool:
        """Whether `get_canonical` would find an object; nothing is read or verified."""
        self._check(context)
        return self._has(self._codec.name(canonical_key(context, chunk_id)))

    def has_patch(
        self, context: Context, chunk_id: str, antecedents: Sequence[str], kind: str = "exact"
    ) -> bool:
        """Whether `get_patch` would find an object; nothing is read or verified."""
        self._check(context)
        return self._has(self._codec.name(patch_key(context, chunk_id, antecedents, kind)))

    def patch_info(
        self, context: Context, chunk_id: str, antecedents: Sequence[str], kind: str = "exact"
    ) -> ObjectInfo | None:
        """Rank, ``formed`` and size of a stored patch, without its tensors."""
        self._check(context)
        key = self._codec.name(patch_key(context, chunk_id, antecedents, kind))
        return (self._disk or self._memory).info(key)

    def contexts_of(self, chunk_id: str) -> list[Context]:
        """Under which contexts of this tenant a chunk's canonical is stored.

        After a miss it tells "never seen" from "made by another backbone or anchor".
        """
        return [i.context for i in self._rows(kind="canonical", chunk_id=chunk_id)]

    def chunks(self, context: Context) -> list[ObjectInfo]:
        """The canonicals under ``context``, oldest first."""
        self._check(context)
        return self._rows(kind="canonical", context=context)

    def ls(self, kind: str | None = None) -> list[ObjectInfo]:
        """This tenant's objects, oldest first; ``kind`` is one of `keys.KINDS`, or None for all."""
        if kind is not None and kind not in KINDS:
            raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
        return self._rows(kind=kind)

    def stats(self) -> StoreStats:
        """Counts and bytes of this tenant's objects, and the memory tier's counters."""
        rows = self._rows()
        canonicals = sum(row.kind == "canonical" for row in rows)
        return StoreStats(
            url=self.url,
            canonicals=canonicals,
            patches=len(rows) - canonicals,
            bytes=sum(row.bytes for row in rows),
            memory=self._memory.stats(),
        )

    def delete(self, key: str) -> bool:
        """Remove one object of this tenant; whether there was one. `ValueError` if it is no key."""
        if not is_key(key):
            raise ValueError(f"{key!r} is no key: 64 lower-case hex digits")
        info = (self._disk or self._memory).info(key)
        if info is None or info.context.tenant != self.tenant:
            return False
        dropped = self._memory.drop(key)
        return dropped if self._disk is None else self._disk.delete(key)

    def verify(self) -> VerifyReport:
        """Read every object of the directory, whoever's it is; damaged ones go to quarantine."""
        if self._disk is None:
            return VerifyReport(ok=len(self._memory.infos()), quarantined=(), refused=())
        return self._disk.verify()

    def rebuild_index(self) -> int:
        """Make the directory's index anew from the files; how many objects it lists."""
        if self._disk is None:
            return len(self._memory.infos())
        return self._disk.rebuild_index()

    def close(self) -> None:
        """Let go of memory and index; the store must not be used afterwards."""
        self._memory.clear()
        if self._disk is not None:
            self._disk.close()

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
        return f"ChunkStore({self.url!r}, memory_limit={self._memory.limit}{tenant})"

    def _check(self, context: Context) -> None:
        if context.tenant != self.tenant:
            raise IncompatibleChunk(
                f"context of tenant {context.tenant!r} in a store opened for {self.tenant!r}: "
                f"open the store with tenant={context.tenant!r}"
            )

    def _get(self, key: str) -> CanonicalRecord | PatchRecord | None:
        if self._disk is None:
            return self._memory.get(key)
        # asking the file each time costs microseconds, and makes a replacement or deletion by
        # another process visible at once
        stamp = self._disk.stamp(key)
        kept = self._memory.get(key, stamp)
        if kept is not None or stamp is None:
            return kept
        found = self._disk.read(key)
        if found is None:
            return None
        record, (info, stamp) = found
        self._memory.put(record, info, stamp)
        return record

    def _put(self, record: RecordType, *, replace: bool) -> str:
        self._check(record.context)
        key = self._codec.name(record.key)
        if not replace and self._has(key):
            return key
        own = detached(record)
        if self._disk is None:
            created = round(time.time(), 3)
            self._memory.put(own, self._codec.describe(own, created, own.nbytes))
        else:
            self._memory.put(own, *self._disk.write(own))
        return key

    def _has(self, key: str) -> bool:
        if self._disk is None:
            return self._memory.info(key) is not None
        return self._disk.stamp(key) is not None

    def _rows(
        self,
        kind: str | None = None,
        chunk_id: str | None = None,
        context: Context | None = None,
    ) -> list[ObjectInfo]:
        if self._disk is not None:
            return self._disk.index.rows(tenant=self.tenant, kind=kind, chunk_id=chunk_id, context=context)
        return [
            info
            for info in self._memory.infos()
            if kind in (None, info.kind)
            and chunk_id in (None, info.chunk_id)
            and context in (None, info.context)
        ]


def _path_of(url: str | os.PathLike[str]) -> Path | None:
    """The directory a store's url names; None for ``memory://``."""
    if not isinstance(url, str):
        return Path(url)
    if url == "memory://":
        return None
    if "://" not in url:
        return Path(url)
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost") or not parts.path:
        raise StoreError(f"cannot open {url!r}: give a directory, file:///directory or memory://")
    return Path(unquote(parts.path))
