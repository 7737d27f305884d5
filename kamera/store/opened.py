"""An object with a verified header, whose tensors are read and verified group by group."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

import torch

from kamera.errors import CorruptChunk
from kamera.store.groups import Group
from kamera.store.head import ObjectHead
from kamera.store.info import ObjectInfo
from kamera.store.records import Record, record_of
from kamera.store.slabs import allocate_bytes
from kamera.store.sources import ByteSource

_INLINE = 1 << 20  # bytes; reading fewer takes less time than waking a thread


class Fetched(NamedTuple):
    """A verified object, its description, the stamp of its file ("" in a remote), and its bytes if wanted."""

    record: Record
    info: ObjectInfo
    stamp: str = ""
    data: bytes = b""


class Payload(Protocol):
    """Source of the bytes of a group, unverified. Safe to use from several threads."""

    def fetch(self, group: Group, views: Sequence[memoryview]) -> None:
        """Fill ``views``, one for each of the group's spans. Raises `CorruptChunk`, `EOFError`, `OSError`."""
        ...


class Plain:
    """Unencrypted tensors behind a front of ``start`` bytes."""

    def __init__(self, source: ByteSource, start: int) -> None:
        self._source = source
        self._start = start

    def fetch(self, group: Group, views: Sequence[memoryview]) -> None:
        for (start, _), view in zip(group.spans, views, strict=True):
            self._source.into(self._start + start, view)


class OpenObject:
    """One object: its verified ``head``, and ``tensors`` in one memory, undefined until filled."""

    def __init__(self, head: ObjectHead, payload: Payload) -> None:
        self.head = head
        self._payload = payload
        memory = self._memory = allocate_bytes(head.size)
        self.tensors: dict[str, torch.Tensor] = {}
        for entries in (group.tensors for group in head.groups.values()):
            for name, entry in entries.items():
                if entry.start == entry.end:
                    self.tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
                else:
                    own = memory[entry.start : entry.end].view(entry.dtype)
                    self.tensors[name] = own.reshape(entry.shape)

    def read(self, pool: ThreadPoolExecutor | None = None) -> Record:
        """The record, every byte of it verified, its groups side by side on the threads of ``pool``.

        No thread reads on after this returns or raises: `CorruptChunk`, and `OSError` as the system does.
        """
        under_way: list[Future[None]] = []
        try:
            for group in self.head.groups:
                if pool is None or self.head.size < _INLINE:
                    self.fill(group)
                    continue
                try:
                    under_way.append(pool.submit(self.fill, group))
                except RuntimeError as error:
                    if "shutdown" not in str(error):
                        raise  # no thread was to be had for it: it is queued all the same
                    self.fill(group)  # the store is being closed
            for filled in under_way:
                filled.result()
        finally:
            for filled in under_way:
                filled.cancel()
            wait(under_way)
        try:
            return record_of(self.head.header, self.tensors)
        except ValueError as error:  # the header is of other tensors than those behind it
            raise CorruptChunk(f"{self.head.source}: {error}") from error

    def fill(self, group: str) -> None:
        """Read one group into memory, and verify the bytes there. Raises `CorruptChunk`, `OSError`."""
        head, own = self.head, self.head.groups[group]
        views = [self._memory[slice(*span)].numpy().data for span in own.spans]
        try:
            self._payload.fetch(own, views)
        except EOFError as error:
            raise CorruptChunk(f"{head.source}: truncated: {error}") from error
        hasher = head.hasher()
        for view in views:
            hasher.update(view)
        if not hmac.compare_digest(hasher.hexdigest(), head.digests[group]):
            raise CorruptChunk(f"{head.source}: the digest does not match, bytes of {group} have changed")
