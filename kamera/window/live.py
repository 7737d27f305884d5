"""The live cache: one preallocated room per window, written in place.

What stands in the room is only ever a copy of what slots hold apart from it (`Copy`), so it can be thrown
away and written again at any time. `LiveCache.hold` makes the room show a state by the fewest writes:
chunks that stand where they should stay untouched, chunks whose keys only turned get their keys, the
others are written whole. Tokens that leave at the front leave a gap in front of the others, into which the
anchor moves up; when the room behind is used up everything is written again from the front.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kamera.engines.hf import Backbone, ModelCache
from kamera.ops import KV, kv_slice, rotated_bytes
from kamera.ops.kernels import serve
from kamera.window.report import Tally
from kamera.window.slots import Span

SLACK = 1024
"""Tokens of room behind a window, at the least: a question and its answer, or the next chunks."""


class _Room:
    """Tensors for ``capacity`` tokens, and who looks at them."""

    def __init__(self, backbone: Backbone, capacity: int) -> None:
        self.kv: KV = backbone.room(capacity)
        self.capacity = capacity
        self.holders: weakref.WeakSet[LiveCache] = weakref.WeakSet()
        self.tail = threading.Lock()  # held by whoever writes behind the last token


class LiveCache:
    """What the model attends to. Forks share a room until one of them has to write in it."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self._room: _Room | None = None
        self._start = 0
        self._spans: tuple[Span, ...] = ()

    def fork(self) -> LiveCache:
        """Another view of the same tokens; the first to write takes a room of its own."""
        branch = LiveCache(self.backbone)
        branch._start, branch._spans = self._start, self._spans
        branch._enter(self._room)
        return branch

    def hold(self, spans: Sequence[Span], tally: Tally, behind: int = 0) -> None:
        """Make the room hold ``spans`` one after another, with ``behind`` tokens of room behind them.

        Bytes are counted where they are written. After an error nothing is held, and the next call
        writes everything.
        """
        wanted = tuple(spans)
        total = sum(s.length for s in wanted)
        if self._stands(wanted) and self._fits(self._start + total + behind):
            self._spans = wanted
            return
        old = dict(zip(self._places(self._spans, self._start), self._spans, strict=True))
        self._spans = ()
        room, base = self._room, self._base(old, wanted)
        if room is None or len(room.holders) > 1 or total + behind > room.capacity:
            source, room = room, _Room(self.backbone, total + max(total // 2, behind, SLACK))
            base, old = 0, self._carry(source, room, old, wanted)
            self._enter(room)  # not before: a branch left alone with the old room may write in it
        elif not 0 <= base <= room.capacity - total - behind:
            base, old = 0, old | self._carry(room, room, old, wanted)
        for place, span in zip(self._places(wanted, base), wanted, strict=True):
            self._write(room, place, span, old.get(place), tally)
        self._start, self._spans = base, wanted

    @contextmanager
    def lent(self) -> Iterator[ModelCache]:
        """A cache of what is held, for the model to read and to grow; what it appends is forgotten.

        It grows in the room's own tail, unless another branch is using that: then in a copy.
        """
        stop = self._start + sum(s.length for s in self._spans)
        room = self._room
        if room is not None and room.tail.acquire(blocking=False):
            try:
                with self.backbone.growing(room.kv, self._start, stop) as cache:
                    yield cache
            finally:
                room.tail.release()
            return
        held = [] if room is None else [kv_slice(room.kv, self._start, stop)]
        yield self.backbone.cache(held)

    @property
    def room(self) -> KV:
        """The tensors it stands in, free places included; none before anything was held."""
        return () if self._room is None else self._room.kv

    def kv(self, index: int) -> KV:
        """Views of what is held of the span at ``index``."""
        assert self._room is not None
        place = self._places(self._spans, self._start)[index]
        return kv_slice(self._room.kv, place, place + self._spans[index].length)

    # -- inside --------------------------------------------------------------------------------

    def _enter(self, room: _Room | None) -> None:
        if self._room is not None:
            self._room.holders.discard(self)
        self._room = room
        if room is not None:
            room.holders.add(self)

    def _stands(self, wanted: Sequence[Span]) -> bool:
        return len(wanted) == len(self._spans) and all(
            new.same_source(old) and new.offset == old.offset
            for new, old in zip(wanted, self._spans, strict=True)
        )

    def _fits(self, stop: int) -> bool:
        return self._room is not None and stop <= self._room.capacity

    @staticmethod
    def _places(spans: Sequence[Span], base: int) -> list[int]:
        places = []
        for span in spans:
            places.append(base)
            base += span.length
        return places

    def _base(self, old: dict[int, Span], wanted: Sequence[Span]) -> int:
        """Where the first span has to stand for the most tokens to stay where they are."""
        stood = {id(span.copy.kv): (place, span) for place, span in old.items()}
        votes: Counter[int] = Counter()
        for place, span in zip(self._places(wanted, 0), wanted, strict=True):
            there, held = stood.get(id(span.copy.kv), (0, None))
            if held is not None and span.same_source(held):
                votes[there - place] += span.length
        return votes.most_common(1)[0][0] if votes else 0

    def _carry(
        self, source: _Room | None, room: _Room, old: dict[int, Span], wanted: Sequence[Span]
    ) -> dict[int, Span]:
        """Copy to the front of ``room`` what stands in ``source`` as it is wanted; those spans, by place.

        Within one room spans move forward only and in order, so that nothing is overwritten unread.
        """
        stood = {id(span.copy.kv): (place, span) for place, span in old.items()}
        carried: dict[int, Span] = {}
        runs: list[tuple[int, int, int]] = []  # to, from, tokens
        for place, span in zip(self._places(wanted, 0), wanted, strict=True):
            there, held = stood.get(id(span.copy.kv), (0, None))
            if not span.length or held is None or not span.same_source(held) or span.offset != held.offset:
                continue
            if source is room and there <= place:
                continue
            carried[place] = span
            if runs and runs[-1][2] == place - runs[-1][0] == there - runs[-1][1]:
                runs[-1] = (*runs[-1][:2], runs[-1][2] + span.length)
            else:
                runs.append((place, there, span.length))
        for place, there, length in runs:
            assert source is not None
            step = min(length, there - place) if source is room else length  # what overlaps goes in steps
            for first in range(0, length, step):
                last = min(first + step, length)
                into = kv_slice(room.kv, place + first, place + last)
                out_of = kv_slice(source.kv, there + first, there + last)
                for new, held_there in zip(into, out_of, strict=True):
                    for name, tensor in new.items():
                        tensor.copy_(held_there[name])
        return carried

    def _write(self, room: _Room, place: int, span: Span, held: Span | None, tally: Tally) -> None:
        """One span into the room, as far as it is not there already."""
        stays = held is not None and span.same_source(held)
        if held is not None and stays and held.offset == span.offset:
            return
        copy, layout = span.copy, self.backbone.layout
        into = kv_slice(room.kv, place, place + span.length)
        serve(into, copy.kv, copy.patch, layout, span.offset, phased_only=stays)
        if any(span.offset):
            tally.bytes_rotated += rotated_bytes(into, layout)
        if copy.patch is not None:
            tally.bytes_patched += copy.patch.nbytes
