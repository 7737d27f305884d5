"""Bytes that a plan will write to the live KV, computed from names of copies as `run` does from tensors.

A name stands for one copy: a chunk that is placed, prefilled or shown clean anew gets another name, even if
the tensors are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kamera.engines import Bytes, LiveKV, Stand, bytes_of, moves
from kamera.ops import KV
from kamera.window.seats import Seats
from kamera.window.state import WindowState
from kamera.window.steps import Clean, Limits, Place, Prefill, Step

_ANCHOR = "anchor"


def standing(live: LiveKV, anchor: KV, state: WindowState) -> tuple[Stand, ...]:
    """Spans of the live KV, by the names of the copies in ``state``; other spans match none of them."""
    names: dict[tuple[int, int], Hashable] = {(id(anchor), id(None)): _ANCHOR}
    for resident in state.residents:
        copy, clean, number = resident.copy, resident.clean, resident.seat.number
        names[id(copy.kv), id(copy.patch)] = ("copy", number)
        if clean is not None:
            names[id(clean.kv), id(clean.patch)] = ("clean", number)
    return tuple(
        [
            Stand(names.get((id(span.kv), id(span.patch)), ("other", i)), span.offset, span.length)
            for i, span in enumerate(live.standing)
        ]
    )


def bytes_written(limits: Limits, before: Seats, steps: Sequence[Step], after: Seats) -> Bytes:
    """Bytes rotated and patched by all shows of a plan: one before each prefill, and the last one."""
    walk = _Walk(limits, before)
    for i, step in enumerate(steps):
        match step:
            case Prefill():
                if not step.joined:  # what is joined runs behind the same show
                    walk.show(step.before)
                moved = sum(head.tokens for head in step.heads if any(head.offset))
                walk.written += Bytes(moved * limits.phased)
                walk.copies[step.seat.number] = ("new", i)
            case Place():
                walk.copies[step.seat.number] = ("new", i)
            case Clean(number):
                walk.cleans[number] = ("new", i)
            case _:
                pass
    walk.show(after)
    return walk.written


class _Walk:
    def __init__(self, limits: Limits, before: Seats) -> None:
        self.limits = limits
        self.here: Sequence[Stand] = limits.standing
        self.copies: dict[int, Hashable] = {s.number: ("copy", s.number) for s in before.seats}
        self.cleans: dict[int, Hashable] = {s.number: ("clean", s.number) for s in before.seats}
        self.written = Bytes()

    def show(self, seats: Seats) -> None:
        """As `Stage.show`."""
        wanted, patches = [Stand(_ANCHOR, seats.frame, self.limits.anchor)], [0]
        for seat in seats.seats:
            offset = seat.offset
            assert offset is not None, "a plan seats no chunk where it cannot stand"
            names = self.copies if seat.clean is None else self.cleans
            wanted.append(Stand(names[seat.number], offset, seat.length))
            patches.append(seat.shown.patch_bytes)
        pairs = enumerate(zip(self.here, wanted, strict=False))
        same = next((i for i, (old, new) in pairs if old != new), min(len(self.here), len(wanted)))
        coming = wanted[same:]  # those before it stay as they are
        self.written += bytes_of(moves(self.here[same:], coming), coming, self.limits.phased, patches[same:])
        self.here = wanted
