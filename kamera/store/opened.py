"""An object whose header was verified, and whose tensors are read and verified group by group."""

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
from kamera.store.sources import Source

_ALIGNED = 64  # bytes; where a stretch of the file begins in memory


class Payload(Protocol):
    """What gives the bytes of a group, unverified. Safe to use from several threads."""

    def fetch(self, group: Group, views: Sequence[memoryview]) -> None:
        """Fill ``views``, one for each of the group's spans. Raises `CorruptChunk`, `EOFError`, `OSError`."""
        ...


class Plain:
    """Tensors that stand in the open behind a front of ``start`` bytes."""

    def __init__(self, source: Source, start: int) -> None:
        self._source = source
        self._start = start

    def fetch(self, group: Group, views: Sequence[memoryview]) -> None:
        """See `Payload`."""
        for (start, _), view in zip(group.spans, views, strict=True):
            self._source.into(self._start + start, view)


@dataclass(frozen=True)
class Opened:
    """One object: what its header says, and where its tensors come from."""

    head: ObjectHead
    payload: Payload

    def room(self) -> Room:
        """Memory for all of it, not yet filled."""
        return Room(self)

    def read(self) -> Record:
        """The record, every byte of it verified. Raises `CorruptChunk`, `OSError`."""
        room = self.room()
        for name in room.groups:
            room.fill(name)
        return room.record()


class Room:
    """Memory for the groups of one object; `fill` may be called from several threads at once.

    ``tensors`` are views of one allocation. What is in them means nothing until their group is filled.
    """

    def __init__(self, opened: Opened) -> None:
        self.groups = groups = opened.head.groups
        self._opened = opened
        places: dict[int, int] = {}  # where stretches of the file start -> where in memory
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
        """Read one group, and verify the very bytes that stand in memory then.

        Raises `CorruptChunk` if they are not those that were written, `OSError` as the system does.
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
        """The record of all tensors; only once every group of the object is filled."""
        return record_of(self._opened.head.header, self.tensors)
