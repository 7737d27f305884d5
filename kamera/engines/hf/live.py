"""The live cache of transformers: one preallocated room, written in place, and shared by forks.

A room holds copies of KV that the spans hold elsewhere, so it can be discarded and rewritten at any time.
`LiveCache.show` brings the room to other spans by the fewest writes (`kamera.engines.moves`): spans in place
stay untouched, spans at another place are copied, keys of which only the offset changed are written alone,
the rest is written whole. Tokens that leave at the front leave a gap in front of the others, into which the
anchor moves up; when the room behind is used up everything moves to the front.

Each fork keeps its spans, and all share one room: it shows the fork used last, and a switch to another costs
the writes for their difference. A fork that has little in common with the room's spans, or is used while
another is being read, takes a room of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from kamera import forks
from kamera.engines.base import Span, Written
from kamera.engines.moves import Move, Stand, moves
from kamera.ops import KV, kv_slice
from kamera.ops.kernels import serve

if TYPE_CHECKING:
    from kamera.engines.hf.model import Model, ModelCache

SLACK = 1024
"""Least number of free tokens behind the spans: for a question and its answer, or the next chunks."""


class _Room:
    """Tensors for ``capacity`` tokens, the spans in them from ``start`` on, and the caches that use them."""

    def __init__(self) -> None:
        self.kv: KV = ()
        self.capacity = 0
        self.start = 0
        self.standing: tuple[Span, ...] = ()
        self.readers = 0  # while there are any, no span in the room is overwritten
        self.lock = forks.Lock()  # in the midst of a write nothing stands
        self.tail = threading.Lock()  # held to write behind the last token
        self.holders: weakref.WeakSet[LiveCache] = weakref.WeakSet()

    def shows(self, spans: Sequence[Span], behind: int) -> bool:
        """True if the room holds exactly these spans, with ``behind`` tokens free behind them."""
        if len(spans) != len(self.standing):
            return False
        total = 0
        for new, old in zip(spans, self.standing, strict=True):
            if not new.same_source(old) or new.offset != old.offset:
                return False
            total += new.length
        return self.start + total + behind <= self.capacity


class LiveCache:
    """The `LiveKV` of a `Backbone`."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._shown: tuple[Span, ...] = ()
        self._behind = 0
        self._room = _Room()
        self._room.holders.add(self)

    @property
    def shown(self) -> tuple[Span, ...]:
        """As `LiveKV.shown`."""
        return self._shown

    @property
    def standing(self) -> tuple[Span, ...]:
        """As `LiveKV.standing`."""
        return self._room.standing

    @property
    def tensors(self) -> KV:
        """As `LiveKV.tensors`."""
        return self._room.kv

    def fork(self) -> LiveCache:
        """As `LiveKV.fork`: nothing is copied."""
        branch = LiveCache(self._model)
        branch._shown, branch._behind = self._shown, self._behind
        branch._enter(self._room)
        return branch

    def show(self, spans: Sequence[Span], *, room: int = 0) -> Written:
        """As `LiveKV.show`; bytes are counted where they are written."""
        wanted, self._shown, self._behind = tuple(spans), (), room
        return self._bring(wanted, room)

    def read(self, index: int) -> KV:
        """As `LiveKV.read`: views of the room."""
        with self._reading() as room:
            places = _places(self._shown, room.start)
            return kv_slice(room.kv, places[index], places[index] + self._shown[index].length)

    @contextmanager
    def lent(self) -> Iterator[ModelCache]:
        """A cache of the shown spans, for the model to read and to grow; appended tokens are dropped.

        It grows in the room's own tail, or in a copy while a fork is using that.
        """
        total = sum(span.length for span in self._shown)
        if not total:
            yield self._model.cache([])
            return
        with self._reading() as room:
            start, stop = room.start, room.start + total
            if not room.tail.acquire(blocking=False):
                yield self._model.cache([kv_slice(room.kv, start, stop)])
                return
            try:
                with self._model.growing(room.kv, start, stop) as cache:
                    yield cache
            finally:
                room.tail.release()

    def check_integrity(self) -> None:
        """As `LiveKV.check_integrity`."""
        room = self._room
        with room.lock:
            total = sum(span.length for span in room.standing)
            assert self in room.holders, "a live cache is not among the holders of its room"
            assert room.readers >= 0, f"{room.readers} readers of a room"
            assert 0 <= room.start <= room.start + total <= room.capacity, (
                f"{total} tokens from {room.start} on in a room of {room.capacity}"
            )
            for layer, spec in zip(room.kv, self._model.layout, strict=False):
                for c in spec.channels:
                    shape = tuple(layer[c.name].shape)
                    assert shape == (c.heads, room.capacity, c.dim), f"channel {c.name} of shape {shape}"

    # -- inside --------------------------------------------------------------------------------

    def _enter(self, room: _Room) -> None:
        with self._room.lock:
            self._room.holders.discard(self)
        with room.lock:
            room.holders.add(self)
        self._room = room

    @contextmanager
    def _reading(self) -> Iterator[_Room]:
        """The room, which shows these spans until the end of the block."""
        while True:
            room = self._room
            with room.lock:
                if room.shows(self._shown, 0):
                    room.readers += 1
                    break
            self._bring(self._shown, self._behind)  # a fork was shown meanwhile
        try:
            yield room
        finally:
            with room.lock:
                room.readers -= 1

    def _bring(self, wanted: tuple[Span, ...], behind: int) -> Written:
        """Make the room show ``wanted``, or take a room that does."""
        room = self._room
        with room.lock:
            written, new = Written(), room
            if not room.shows(wanted, behind):
                made = moves(_stands(room.standing), _stands(wanted))
                if room.readers or not self._may_write(room, made, wanted):
                    new = _Room()
                written = self._write(room, new, made, wanted, behind)
            self._shown = new.standing
        if new is not room:
            self._enter(new)  # not before: an error leaves the old room to the others
        return written

    def _may_write(self, room: _Room, made: Sequence[Move], wanted: Sequence[Span]) -> bool:
        """True if at least half of ``wanted`` is kept, or if no other fork shows the spans in the room."""
        kept = sum(span.length for span, move in zip(wanted, made, strict=True) if not move.writes)
        return 2 * kept >= sum(span.length for span in wanted) or all(
            other is self or other._shown is not room.standing for other in room.holders
        )

    def _write(
        self, source: _Room, room: _Room, made: Sequence[Move], wanted: tuple[Span, ...], behind: int
    ) -> Written:
        """Write ``wanted`` into ``room``, reusing the spans in ``source``, the same room or another."""
        total = sum(span.length for span in wanted)
        there = _places(source.standing, source.start)
        kv, capacity = room.kv, room.capacity
        if total + behind > capacity:
            capacity = total + max(total // 2, behind, SLACK)
            kv = self._model.room(capacity)
        base = _base(made, wanted, there) if kv is source.kv else 0
        base = base if 0 <= base <= capacity - total - behind else 0
        places = _places(wanted, base)
        room.standing = ()  # until all of it is written
        written = self._carry(source.kv, kv, made, wanted, there, places)
        for move, span, place in zip(made, wanted, places, strict=True):
            if move.writes and span.length:
                written += self._serve(kv_slice(kv, place, place + span.length), span, move.turns)
        room.kv, room.capacity, room.start, room.standing = kv, capacity, base, wanted
        return written

    def _serve(self, into: KV, span: Span, turns: bool) -> Written:
        """Write one span from its own KV: whole, or its phased channels alone if it ``turns``."""
        model = self._model
        serve(into, span.kv, span.patch, model.layout, span.offset, phased_only=turns)
        phased = span.length * model.phased_bytes_per_token
        whole = phased if turns else span.length * model.bytes_per_token
        turned = phased if any(span.offset) else 0
        return Written(turned, 0 if span.patch is None else span.patch.nbytes, whole - turned)

    def _carry(
        self,
        source: KV,
        into: KV,
        made: Sequence[Move],
        wanted: Sequence[Span],
        there: Sequence[int],
        places: Sequence[int],
    ) -> Written:
        """Copy reused spans to their places; of a span that turns, the free channels alone.

        Reused spans keep their order. So within one room, spans that move down are copied first to last and
        spans that move up last to first: none overwrites tokens that are still to be read.
        """
        runs: list[_Run] = []
        for move, span, place in zip(made, wanted, places, strict=True):
            if move.was is None or not span.length:
                continue
            run = _Run(place, there[move.was], span.length, move.turns)
            if source is into and run.to == run.out_of:
                continue
            if runs and runs[-1].goes_on_in(run):
                run = runs.pop().longer(run.length)
            runs.append(run)
        down = [run for run in runs if run.to < run.out_of]
        up = [run for run in runs if run.to >= run.out_of]
        copied = sum(self._copy(source, into, run) for run in (*down, *reversed(up)))
        return Written(bytes_copied=copied)

    def _copy(self, source: KV, into: KV, run: _Run) -> int:
        step = min(run.length, abs(run.to - run.out_of)) if source is into else run.length
        firsts = list(range(0, run.length, step))  # overlaps are copied in steps
        copied = 0
        for first in firsts if run.to < run.out_of else reversed(firsts):
            last = min(first + step, run.length)
            for new, old, spec in zip(into, source, self._model.layout, strict=True):
                for c in spec.channels:
                    if not (run.free and c.rope):
                        part = new[c.name][:, run.to + first : run.to + last]
                        part.copy_(old[c.name][:, run.out_of + first : run.out_of + last])
                        copied += part.numel() * part.element_size()
        return copied


class _Run(NamedTuple):
    """Tokens to be copied at once; if ``free``, their free channels alone."""

    to: int
    out_of: int
    length: int
    free: bool

    def goes_on_in(self, other: _Run) -> bool:
        """True if ``other`` follows it directly, at the source and at the target."""
        ends = (self.to + self.length, self.out_of + self.length, self.free)
        return ends == (other.to, other.out_of, other.free)

    def longer(self, tokens: int) -> _Run:
        """The run with ``tokens`` more."""
        return self._replace(length=self.length + tokens)


def _stands(spans: Sequence[Span]) -> list[Stand]:
    return [Stand((id(s.kv), id(s.patch)), s.offset, s.length) for s in spans]


def _places(spans: Sequence[Span], base: int) -> list[int]:
    places = []
    for span in spans:
        places.append(base)
        base += span.length
    return places


def _base(made: Sequence[Move], wanted: Sequence[Span], there: Sequence[int]) -> int:
    """Start of the first span at which the most tokens stay in place."""
    votes: Counter[int] = Counter()
    for move, span, place in zip(made, wanted, _places(wanted, 0), strict=True):
        if move.was is not None:
            votes[there[move.was] - place] += span.length
    return votes.most_common(1)[0][0] if votes else 0
