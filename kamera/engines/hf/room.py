"""The memory of live caches: a room for many tokens, and KV that stands in it and nowhere else.

KV that is prefilled behind a live cache is written by the model where it is to stand. It need not be held
twice: a `RoomKV` says where it stands, and is copied out of the room only before something else is written
there, or before its keys turn, since every turn starts from the keys as the model computed them. A KV that
nobody refers to any more is not copied.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from kamera import forks
from kamera.engines.base import LiveKV, Span
from kamera.ops import KV, NO_KV, Blocks, kv_copy, kv_slice, kv_tokens


class CacheRoom:
    """Tensors for ``capacity`` tokens, the spans in them from ``start`` on, and the caches that use them.

    ``lock`` is held to write to the room or to its records; in the midst of a write nothing stands.
    """

    def __init__(self) -> None:
        self.kv: KV = NO_KV
        self.capacity = 0
        self.start = 0
        self.spans: tuple[Span, ...] = ()
        self.readers = 0  # while there are any, no span in the room is overwritten
        self.lock = forks.Lock()
        self.tail = threading.Lock()  # held to write behind the last token
        self.holders: weakref.WeakSet[LiveKV] = weakref.WeakSet()
        self.only_here: weakref.WeakSet[RoomKV] = weakref.WeakSet()

    @property
    def stop(self) -> int:
        """The first place behind the spans."""
        return self.start + sum([span.length for span in self.spans])

    def shows(self, spans: Sequence[Span], free_tokens: int) -> bool:
        """True if the room holds exactly these spans, with ``free_tokens`` tokens free behind them."""
        if len(spans) != len(self.spans):
            return False
        total = 0
        for new, old in zip(spans, self.spans, strict=True):
            if (id(new.kv), id(new.patch), new.offset) != (id(old.kv), id(old.patch), old.offset):
                return False
            total += new.length
        return self.start + total + free_tokens <= self.capacity

    def adopt(self, lengths: Sequence[int]) -> tuple[RoomKV, ...]:
        """KV of spans that were written behind those that stand; they stand from now on. ``lock`` is held."""
        places = accumulate(lengths, initial=self.stop)
        kvs = [RoomKV(self, place, length) for place, length in zip(places, lengths, strict=False)]
        zero_offset = (0,) * len(self.spans[0].offset)
        self.spans = (*self.spans, *(Span(kv, None, zero_offset) for kv in kvs))
        return tuple(kvs)

    def copy_out_regions(self, regions: Sequence[tuple[int, int]], stays: Container[int] = ()) -> None:
        """Before ``regions`` (start, stop) are overwritten, copy out what stands in them and nowhere else.

        ``stays`` are ids of KV that needs none. ``lock`` is held.
        """
        for kv in [kv for kv in self.only_here if id(kv) not in stays]:
            start = kv.where.place
            if any([start < stop and first < start + kv.tokens for first, stop in regions]):
                kv.copy_out()


class _Where(NamedTuple):
    """The room and place of a KV (None: it stands in none), and the channels that it holds itself, by block.

    Replaced as a whole, so that a reader sees one state.
    """

    room: CacheRoom | None
    place: int
    own: tuple[Mapping[str, torch.Tensor], ...]


class RoomKV(Blocks[torch.Tensor]):
    """KV as the model computed it, which stands in a room: as a `KV`, each read of its parts is a copy.

    Reading takes the room's lock, so it may be done by any thread that holds none. ``tokens`` and ``groups``
    cost nothing.
    """

    def __init__(self, room: CacheRoom, place: int, tokens: int) -> None:
        self.groups = room.kv.groups
        self.tokens = tokens
        self.where = _Where(room, place, tuple({} for _ in self.groups))
        room.only_here.add(self)

    @classmethod
    def apart(cls, kv: KV) -> RoomKV:
        """``kv``, which stands in no room yet."""
        self = cls.__new__(cls)
        self.groups, self.tokens = kv.groups, kv_tokens(kv)
        self.where = _Where(None, 0, tuple(kv.parts))
        return self

    @property
    def parts(self) -> Any:  # type: ignore[override]
        """The blocks: its own, and copies of those in the room."""
        while True:
            where = self.where
            if where.room is None:
                return where.own
            with where.room.lock:
                if self.where.room is where.room:
                    return kv_copy(self.room_views()).parts

    def room_views(self) -> KV:
        """Views of the room, and what it holds itself; the room's ``lock`` is held while they are used."""
        room, place, own = self.where
        if room is None:
            return Blocks(own, self.groups)
        room_kv = kv_slice(room.kv, place, place + self.tokens)
        parts = [{**block, **own_block} for block, own_block in zip(room_kv.parts, own, strict=True)]
        return Blocks(parts, self.groups)

    def copy_out(self, channels: frozenset[str] | None = None) -> None:
        """Copy these channels out of the room, whose ``lock`` is held.

        None: all of them, and it stands there no more.
        """
        room, place, own = self.where
        assert room is not None, "it has left"
        room_kv = kv_slice(room.kv, place, place + self.tokens)
        own_blocks = []
        for block, own_block in zip(room_kv.parts, own, strict=True):
            new = [name for name in block if name not in own_block and (channels is None or name in channels)]
            own_blocks.append({**own_block, **{name: block[name].detach().clone() for name in new}})
        if channels is None:
            room.only_here.discard(self)
        self.where = _Where(None if channels is None else room, place, tuple(own_blocks))

    def has_own(self, channels: frozenset[str]) -> bool:
        """True if it holds these channels itself, as far as its blocks have them."""
        where = self.where
        if where.room is None or not channels:
            return True
        block_channels = [channels & block.keys() for block in where.room.kv.parts]
        return all([own.keys() >= names for own, names in zip(where.own, block_channels, strict=True)])

    def set_place(self, room: CacheRoom, place: int, keeps: frozenset[str]) -> None:
        """It stands at ``place`` of ``room``, but for the channels ``keeps``, which it `has_own` itself.

        The ``lock`` of both rooms is held.
        """
        old, _, own = self.where
        if old is not None and old is not room:
            old.only_here.discard(self)
        kept_blocks = tuple({n: t for n, t in block.items() if n in keeps} for block in own)
        self.where = _Where(room, place, kept_blocks)
        room.only_here.add(self)

    def contents(self) -> Iterator[torch.Tensor]:
        """The tensors of its own: none of what stands in the room alone."""
        for own in self.where.own:
            yield from own.values()

    def __copy__(self) -> KV:
        return Blocks(self.parts, self.groups)

    def __getitem__(self, index: int | slice) -> Any:
        return Blocks(self.parts, self.groups)[index]

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        return iter(Blocks(self.parts, self.groups))
