"""Live caches and their memory: a room for many tokens, and KV that stands in it and nowhere else.

KV that is prefilled behind a live cache is written by the model where it is to stand. It need not be held
twice: a `RoomKV` says where it stands, and is copied out of the room only before something else is written
there, or before its keys turn, since every turn starts from the keys as the model computed them. A KV that
nobody refers to any more is not copied.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kamera import forks
from kamera.engines.base import LiveKV, Span
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import forwards
from kamera.engines.hf.cache import ModelCache
from kamera.engines.moves import Move, Stand, Written, plan_moves
from kamera.ops import KV, NO_KV, Blocks, kv_copy, kv_slice, kv_tokens
from kamera.ops.kernels import serve

if TYPE_CHECKING:
    from kamera.engines.hf.engine import HfEngine


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


_SMALL = 512
_SPARE = 11
"""A room has an eleventh to spare of its tokens above `_SMALL`: growth copies a token a dozen times in all.
What finds no place behind the spans, as an answer, stands in the cache that grows there."""

_LARGE = 32
"""A room with a thirty-second of its tokens beside that is large: it is made anew before the next forward."""

_LEAST = 8
"""Tokens with which no room is large."""

_NONE: frozenset[str] = frozenset()


class LiveCache:
    """The `LiveKV` of an `HfEngine`; ``holds`` as in `Engine.live`."""

    def __init__(self, model: HfEngine, holds: bool = False) -> None:
        self._model = model
        self._holds = holds
        self._phased = frozenset([c.name for spec in model.layout for c in spec.channels if c.rope])
        self._lent_cache: ModelCache | None = None
        self._spans: tuple[Span, ...] = ()
        self._free_tokens = 0
        self._room = CacheRoom()
        self._room.holders.add(self)

    @property
    def shown(self) -> tuple[Span, ...]:
        return self._spans

    @property
    def tensors(self) -> KV:
        return self._room.kv

    def fork(self) -> LiveCache:
        """As `LiveKV.fork`: nothing is copied."""
        branch = LiveCache(self._model, self._holds)
        branch._spans, branch._free_tokens = self._spans, self._free_tokens
        branch._move_to_room(self._room)
        return branch

    def show(self, spans: Sequence[Span], *, room: int = 0) -> Written:
        """As `LiveKV.show`; bytes are counted where they are written."""
        new_spans, self._spans, self._free_tokens = tuple(spans), (), room
        return self._show_in_room(new_spans, room)

    def hold(self, kv: KV) -> KV:
        """As `LiveKV.hold`."""
        is_plain = type(kv) is Blocks and kv.groups == self._model.groups and bool(kv_tokens(kv))
        return RoomKV.apart(kv) if self._holds and is_plain else kv

    def read(self, index: int) -> KV:
        """As `LiveKV.read`: views of the room."""
        with self._reading() as room:
            places = _places(self._spans, room.start)
            return kv_slice(room.kv, places[index], places[index] + self._spans[index].length)

    @contextmanager
    def lend(self) -> Iterator[ModelCache]:
        """A cache of the shown spans, for the model to read and to grow; appended tokens are dropped.

        It grows in the room's own tail as far as that goes, and apart from it while a fork is using that.
        """
        total = sum([span.length for span in self._spans])
        if not total:
            yield forwards.make_cache(self._model, [])
            return
        room = self._room
        if not room.readers and room.capacity > self._largest(room):
            self._show_in_room(self._spans, self._free_tokens, shrinks=True)
        with self._reading() as room:
            start, stop = room.start, room.start + total
            model, grows = self._model, room.tail.acquire(blocking=False)
            try:
                if grows:
                    with room.lock:
                        room.copy_out_regions([(stop, room.capacity)])
                end = room.capacity if grows else stop
                cache = model_cache.growing_cache(model.model.config, model.layout, room.kv, start, stop, end)
                self._lent_cache = cache if grows else self._lent_cache
                try:
                    yield cache
                finally:
                    model_cache.detach(cache)
            finally:
                if grows:
                    self._lent_cache = None
                    room.tail.release()

    def adopt(self, cache: ModelCache, start: int, lengths: Sequence[int]) -> tuple[KV, ...] | None:
        """KV of consecutive spans by which the lent ``cache`` was extended from its token ``start`` on.

        They stand here from now on. None if it does not hold KV, or if they do not stand right behind the
        spans: then they have to be copied.
        """
        room = self._room
        if not self._holds or cache is not self._lent_cache or not model_cache.is_in_room(cache):
            return None
        with room.lock:
            return room.adopt(lengths) if room.stop - room.start == start else None

    def check_integrity(self) -> None:
        room = self._room
        with room.lock:
            total = sum(span.length for span in room.spans)
            assert self in room.holders, "a live cache is not among the holders of its room"
            assert room.readers >= 0, f"{room.readers} readers of a room"
            assert 0 <= room.start <= room.start + total <= room.capacity, (
                f"{total} tokens from {room.start} on in a room of {room.capacity}"
            )
            for block, layers in zip(room.kv.parts, room.kv.groups, strict=True):
                for c in self._model.layout[layers[0]].channels:
                    shape, sizes = tuple(block[c.name].shape), (len(layers), c.heads, room.capacity, c.dim)
                    assert shape == sizes, f"channel {c.name} of shape {shape}"

    # -- inside --------------------------------------------------------------------------------

    def _move_to_room(self, room: CacheRoom) -> None:
        with self._room.lock:
            self._room.holders.discard(self)
        with room.lock:
            room.holders.add(self)
        self._room = room

    @contextmanager
    def _reading(self) -> Iterator[CacheRoom]:
        """The room, which shows these spans until the end of the block."""
        while True:
            room = self._room
            with room.lock:
                if room.shows(self._spans, 0):
                    room.readers += 1
                    break
            self._show_in_room(self._spans, self._free_tokens)  # a fork was shown meanwhile
        try:
            yield room
        finally:
            with room.lock:
                room.readers -= 1

    def _show_in_room(self, spans: tuple[Span, ...], free_tokens: int, *, shrinks: bool = False) -> Written:
        """Make the room show ``spans``, or take a room that does; one that ``shrinks`` is made anew."""
        room, copies = self._room, dict[int, KV]()
        while True:
            with room.lock:
                counts, new = Written(), room
                if shrinks or not room.shows(spans, free_tokens):
                    steps = plan_moves(_as_stands(room.spans), _as_stands(spans))
                    room_kvs = _kv_in_other_rooms(room, steps, spans, copies)
                    if not room_kvs:
                        if room.readers or not self._may_write(room, steps, spans):
                            new = CacheRoom()
                        counts = self._write(room, new, steps, spans, free_tokens, copies, shrinks)
                else:
                    room_kvs = []
                if not room_kvs:
                    self._spans = new.spans
                    if new is not room and len(room.holders) == 1:
                        self._empty_room(room, new)
                    break
            # read without a lock of ours: two rooms must not wait for each other
            copies |= {id(kv): Blocks(kv.parts, kv.groups) for kv in room_kvs}
        if new is not room:
            self._move_to_room(new)  # not before: an error leaves the old room to the others
        return counts

    def _largest(self, room: CacheRoom) -> int:
        """The largest capacity that the spans of all that use a room may take up."""
        totals = [sum([s.length for s in one.shown]) for one in room.holders]
        tokens = max([*totals, sum([s.length for s in self._spans]) + self._free_tokens])
        return _capacity(tokens) + max(tokens // _LARGE, _LEAST)

    def _empty_room(self, room: CacheRoom, new: CacheRoom) -> None:
        """What stands in a room that nobody uses any more stands in the ``new`` one, or is copied out."""
        places = _places(new.spans, new.start)
        targets = {id(s.kv): (s, place) for s, place in zip(new.spans, places, strict=True)}
        for kv in list(room.only_here):
            span, place = targets.get(id(kv), (None, 0))
            if span is None or span.patch is not None:
                kv.copy_out()
            else:
                own = self._phased if any(span.offset) else frozenset[str]()
                kv.copy_out(own)
                kv.set_place(new, place, own)

    def _may_write(self, room: CacheRoom, steps: Sequence[Move], spans: Sequence[Span]) -> bool:
        """True if at least half of ``spans`` is kept, or if no other fork shows the spans in the room."""
        kept_tokens = sum([span.length for span, move in zip(spans, steps, strict=True) if not move.writes])
        return 2 * kept_tokens >= sum([span.length for span in spans]) or all(
            [other is self or other.shown is not room.spans for other in room.holders]
        )

    def _write(
        self,
        source: CacheRoom,
        room: CacheRoom,
        steps: Sequence[Move],
        spans: tuple[Span, ...],
        free_tokens: int,
        copies: Mapping[int, KV],
        shrinks: bool,
    ) -> Written:
        """Write ``spans`` into ``room``, reusing the spans in ``source``, the same room or another.

        ``copies`` are copies of KV that stands in other rooms, by id.
        """
        total = sum([span.length for span in spans])
        starts = _places(source.spans, source.start)
        kv, capacity = room.kv, room.capacity
        if shrinks or total + free_tokens > capacity:
            capacity = _capacity(total + free_tokens)
            kv = forwards.allocate_kv(self._model, capacity)
        base = _base(steps, spans, starts) if kv is source.kv else 0
        base = base if 0 <= base <= capacity - total - free_tokens else 0
        places = _places(spans, base)
        room.spans = ()  # until all of it is written
        runs = _copy_runs(steps, spans, starts, places, in_place=kv is source.kv)
        if room is source:
            self._copy_out_overwritten(room, steps, spans, places, runs, regrows=kv is not room.kv)
        counts = self._copy_reused(source.kv, kv, runs)
        room.kv, room.capacity, room.start = kv, capacity, base
        if room is source:  # before anything can fail
            for move, span, place in zip(steps, spans, places, strict=True):
                if move.was is not None and not _is_in_place(room, move, span, place):
                    _note_place(room, span, place, self._phased if move.turns or any(span.offset) else _NONE)
        for move, span, place in zip(steps, spans, places, strict=True):
            if move.writes and span.length:
                span_kv = copies.get(id(span.kv), span.kv)
                span_kv = span_kv.room_views() if isinstance(span_kv, RoomKV) else span_kv
                counts += self._write_span(
                    kv_slice(kv, place, place + span.length), span, span_kv, move.turns
                )
                _note_place(room, span, place, self._phased if any(span.offset) else _NONE)
        room.spans = spans
        return counts

    def _copy_out_overwritten(
        self,
        room: CacheRoom,
        steps: Sequence[Move],
        spans: Sequence[Span],
        places: Sequence[int],
        runs: Sequence[_CopyRun],
        regrows: bool,
    ) -> None:
        """Copy out of a room what is there alone and is to be overwritten, or stays in a block that goes."""
        stays = set()
        for move, span in zip(steps, spans, strict=True):
            if move.was is not None and isinstance(span.kv, RoomKV) and span.kv.where.room is room:
                stays.add(id(span.kv))
                if move.turns:
                    span.kv.copy_out(self._phased)
        if regrows:
            room.copy_out_regions([(0, room.capacity)], stays)
            return
        whole = [(p, p + s.length) for m, s, p in zip(steps, spans, places, strict=True) if m.was is None]
        room.copy_out_regions([*whole, *((run.to, run.to + run.length) for run in runs)], stays)

    def _write_span(self, into: KV, span: Span, source: KV, turns: bool) -> Written:
        """Write one span from its own KV: whole, or its phased channels alone if it ``turns``."""
        model = self._model
        serve(into, source, span.patch, model.layout, span.offset, phased_only=turns)
        phased_bytes = span.length * model.facts.phased_bytes_per_token
        all_bytes = phased_bytes if turns else span.length * model.facts.bytes_per_token
        turned_bytes = phased_bytes if any(span.offset) else 0
        return Written(turned_bytes, 0 if span.patch is None else span.patch.nbytes, all_bytes - turned_bytes)

    def _copy_reused(self, source: KV, into: KV, runs: Sequence[_CopyRun]) -> Written:
        """Copy reused spans to their places; of a span that turns, the free channels alone.

        Reused spans keep their order. So within one room, spans that move down are copied first to last and
        spans that move up last to first: none overwrites tokens that are still to be read.
        """
        down_runs = [run for run in runs if run.to < run.out_of]
        up_runs = [run for run in runs if run.to >= run.out_of]
        copied_bytes = sum([self._copy(source, into, run) for run in (*down_runs, *reversed(up_runs))])
        return Written(bytes_copied=copied_bytes)

    def _copy(self, source: KV, into: KV, run: _CopyRun) -> int:
        step = min(run.length, abs(run.to - run.out_of)) if source is into else run.length
        firsts = list(range(0, run.length, step))  # overlaps are copied in steps
        copied_bytes = 0
        for first in firsts if run.to < run.out_of else reversed(firsts):
            last = min(first + step, run.length)
            for new, old, layers in zip(into.parts, source.parts, into.groups, strict=True):
                for c in self._model.layout[layers[0]].channels:
                    if not (run.free and c.rope):
                        part = new[c.name][:, :, run.to + first : run.to + last]
                        part.copy_(old[c.name][:, :, run.out_of + first : run.out_of + last])
                        copied_bytes += part.nbytes
        return copied_bytes


def _capacity(tokens: int) -> int:
    """Tokens of a room that is made for so many."""
    return tokens + max(0, tokens - _SMALL) // _SPARE


class _CopyRun(NamedTuple):
    """Tokens to be copied at once; if ``free``, their free channels alone."""

    to: int
    out_of: int
    length: int
    free: bool


def _copy_runs(
    steps: Sequence[Move], spans: Sequence[Span], starts: Sequence[int], places: Sequence[int], in_place: bool
) -> list[_CopyRun]:
    """What is to be copied, as few runs of tokens; ``in_place``: source and target are one block."""
    runs: list[_CopyRun] = []
    for move, span, place in zip(steps, spans, places, strict=True):
        if move.was is None or not span.length:
            continue
        run = _CopyRun(place, starts[move.was], span.length, move.turns)
        if in_place and run.to == run.out_of:
            continue
        last = runs[-1] if runs else run
        if run[:2] == (last.to + last.length, last.out_of + last.length) and run.free == last.free:
            run = runs.pop()._replace(length=last.length + run.length)  # it goes on behind the last
        runs.append(run)
    return runs


def _note_place(room: CacheRoom, span: Span, place: int, own: frozenset[str]) -> None:
    """Note that an unpatched KV stands at ``place`` of the room, and holds copies of ``own`` channels alone.

    KV that stands in another room stays there.
    """
    kv = span.kv
    if isinstance(kv, RoomKV) and span.patch is None and kv.where.room in (None, room) and kv.has_own(own):
        kv.set_place(room, place, own)


def _is_in_place(room: CacheRoom, move: Move, span: Span, place: int) -> bool:
    """True for KV that stands in its room as before."""
    where = span.kv.where if isinstance(span.kv, RoomKV) else None
    return where is not None and where.room is room and where.place == place and not move.turns


def _kv_in_other_rooms(
    room: CacheRoom, steps: Sequence[Move], spans: Sequence[Span], copied_ids: Container[int]
) -> list[RoomKV]:
    """KV that is to be written, stands in another room and is not among ``copied_ids``."""
    kvs = [span.kv for move, span in zip(steps, spans, strict=True) if move.writes]
    room_kvs = [kv for kv in kvs if isinstance(kv, RoomKV) and id(kv) not in copied_ids]
    return [kv for kv in room_kvs if kv.where.room not in (None, room)]


def _as_stands(spans: Sequence[Span]) -> list[Stand]:
    return [Stand((id(s.kv), id(s.patch)), s.offset, s.length) for s in spans]


def _places(spans: Sequence[Span], base: int) -> list[int]:
    return list(accumulate([span.length for span in spans], initial=base))[:-1]


def _base(steps: Sequence[Move], spans: Sequence[Span], starts: Sequence[int]) -> int:
    """Start of the first span at which the most tokens stay in place."""
    votes: Counter[int] = Counter()
    for move, span, place in zip(steps, spans, _places(spans, 0), strict=True):
        if move.was is not None:
            votes[starts[move.was] - place] += span.length
    return votes.most_common(1)[0][0] if votes else 0
