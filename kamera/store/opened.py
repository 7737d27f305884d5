"""An object with a verified header, whose tensors are read and verified group by group."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kamera.errors import CorruptChunk
from kamera.store.groups import Group
from kamera.store.head import ObjectHead
from kamera.store.records import Record, record_of
from kamera.store.slabs import allocated
from kamera.store.sources import ByteSource


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
        """See `Payload`."""
        for (start, _), view in zip(group.spans, views, strict=True):
            self._source.into(self._start + start, view)


@dataclass(frozen=True)
class OpenObject:
    """One object: its verified header, and the source of its tensors."""

    head: ObjectHead
    payload: Payload

    def room(self) -> ObjectRoom:
        """Memory for the whole object, not yet filled."""
        return ObjectRoom(self)

    def read(self) -> Record:
        """The record, every byte of it verified. Raises `CorruptChunk`, `OSError`."""
        room = self.room()
        for name in room.groups:
            room.fill(name)
        return room.record()


class ObjectRoom:
    """Memory for the tensors of one object, laid out as in its file; groups are filled in any threads.

    ``tensors`` are views of one allocation. Their values are undefined until their group is filled.
    """

    def __init__(self, opened: OpenObject) -> None:
        self.groups = opened.head.groups
        self._opened = opened
        memory = self._memory = allocated(opened.head.size)
        self.tensors: dict[str, torch.Tensor] = {}
        for entries in (group.tensors for group in self.groups.values()):
            for name, entry in entries.items():
                if entry.start == entry.end:
                    self.tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
                else:
                    own = memory[entry.start : entry.end].view(entry.dtype)
                    self.tensors[name] = own.reshape(entry.shape)

    def fill(self, group: str) -> None:
        """Read one group into memory, and verify the bytes there.

        Raises `CorruptChunk` if they differ from those that were written, `OSError` as the system does.
        """
        head = self._opened.head
        views = [self._memory[slice(*span)].numpy().data for span in self.groups[group].spans]
        try:
            self._opened.payload.fetch(self.groups[group], views)
        except EOFError as error:
            raise CorruptChunk(f"{head.source}: truncated: {error}") from error
        hasher = head.hasher()
        for view in views:
            hasher.update(view)
        if not hmac.compare_digest(hasher.hexdigest(), head.digests[group]):
            raise CorruptChunk(f"{head.source}: the digest does not match, bytes of {group} have changed")

    def record(self) -> Record:
        """The record of all tensors; to be called after every group of the object is filled."""
        head = self._opened.head
        try:
            return record_of(head.header, self.tensors)
        except ValueError as error:  # the header is of other tensors than those behind it
            raise CorruptChunk(f"{head.source}: {error}") from error
