"""An object with a verified header, whose tensors are read and verified group by group."""

from __future__ import annotations

import bisect
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kamera.errors import CorruptChunk
from kamera.store.groups import Group, joined
from kamera.store.head import ObjectHead
from kamera.store.records import Record, record_of
from kamera.store.slabs import allocated
from kamera.store.sources import ByteSource

_ALIGNED = 64  # bytes; alignment in memory of a range of the file


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
    """Memory for the groups of one object; `fill` may be called from several threads at once.

    ``tensors`` are views of one allocation. Their values are undefined until their group is filled.
    """

    def __init__(self, opened: OpenObject) -> None:
        self.groups = groups = opened.head.groups
        self._opened = opened
        places: dict[int, int] = {}  # start of a range in the file -> start in memory
        size = 0
        for start, end in joined(span for group in groups.values() for span in group.spans):
            places[start] = size
            size += -(-(end - start) // _ALIGNED) * _ALIGNED
        memory, starts = allocated(size), list(places)

        def place(start: int, end: int) -> torch.Tensor:
            first = starts[bisect.bisect_right(starts, start) - 1]
            at = places[first] + start - first
            return memory[at : at + end - start]

        self.tensors: dict[str, torch.Tensor] = {}
        self._views: dict[str, list[memoryview]] = {}
        for group in groups.values():
            for name, entry in group.tensors.items():
                if entry.start == entry.end:
                    self.tensors[name] = torch.empty(entry.shape, dtype=entry.dtype)
                else:
                    held = place(entry.start, entry.end).view(entry.dtype)
                    self.tensors[name] = held.reshape(entry.shape)
            self._views[group.name] = [place(*span).numpy().data for span in group.spans]

    def fill(self, group: str) -> None:
        """Read one group into memory, and verify the bytes there.

        Raises `CorruptChunk` if they differ from those that were written, `OSError` as the system does.
        """
        head, views = self._opened.head, self._views[group]
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
