"""Bytes that a plan will write to the live KV, computed from names of copies as `run` does from tensors.

A name stands for one copy: a chunk that is placed, prefilled or shown clean anew gets another name, even if
the tensors are the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from kamera.engines import LiveKV, Stand, Written, bytes_of, moves
from kamera.ops import KV
from kamera.window.seats import Seats
from kamera.window.state import WindowState
from kamera.window.steps import Clean, Place, Plan, Prefill, Sample, sample_group

_ANCHOR = "anchor"


def live_stands(live: LiveKV, anchor: KV, state: WindowState) -> tuple[Stand, ...]:
    """Spans of the live KV, by the names of the copies in ``state``; other spans match none of them."""
    names: dict[tuple[int, int], Hashable] = {(id(anchor), id(None)): _ANCHOR}
    for number, resident in state.tensors.items():
        copy, clean = resident.copy, resident.clean
        names[id(copy.kv), id(copy.patch)] = ("copy", number)
        if clean is not None:
            names[id(clean.kv), id(clean.patch)] = ("clean", number)
    return tuple(
        [
            Stand(names.get((id(span.kv), id(span.patch)), ("other", i)), span.offset, span.length)
            for i, span in enumerate(live.standing)
        ]
    )


def bytes_written(plan: Plan, stands: Sequence[Stand], anchor: int, phased: int) -> Written:
    """Bytes rotated and patched by all shows of a plan: one before each prefill, and the last one.

    ``stands`` are the spans of the live KV before it, the first of ``anchor`` tokens, ``phased`` the bytes of
    a token that are rotated when it moves.
    """
    walk = _Shows(plan.before, stands, anchor, phased)
    group: list[Prefill | Sample] = []
    for i, step in enumerate(plan.steps):
        if isinstance(step, Prefill | Sample) and not step.joined:
            group = sample_group(plan.steps, i)
        match step:
            case Prefill():
                if not (step.joined or group):  # what is joined runs behind the same show
                    walk.show(step.before)
                moved = sum(head.tokens for head in step.heads if any(head.offset))
                walk.written += Written(moved * phased)
                walk.copies[step.seat.number] = ("new", i)
            case Sample() if step is group[-1]:  # what is placed between the samples stands there by now
                walk.show(step.before.joined(step.seat), group)
                for sampled in group:
                    walk.copies[sampled.seat.number] = ("new", i, sampled.seat.number)
            case Place():
                walk.copies[step.seat.number] = ("new", i)
            case Clean(number):
                walk.cleans[number] = ("new", i)
            case _:
                pass
    walk.show(plan.after)
    return walk.written


class _Shows:
    def __init__(self, before: Seats, stands: Sequence[Stand], anchor: int, phased: int) -> None:
        self.here, self.anchor, self.phased = stands, anchor, phased
        self.copies: dict[int, Hashable] = {s.number: ("copy", s.number) for s in before.seats}
        self.cleans: dict[int, Hashable] = {s.number: ("clean", s.number) for s in before.seats}
        self.written = Written()

    def show(self, seats: Seats, group: Sequence[Prefill | Sample] = ()) -> None:
        """As `Stage.show`; of a ``group`` the bases of samples, and nothing of what is prefilled."""
        wanted, patches = [Stand(_ANCHOR, seats.frame, self.anchor)], [0]
        running = {step.seat.number: step for step in group}
        for seat in seats.seats:
            step = running.get(seat.number)
            if isinstance(step, Prefill):
                continue
            names = self.copies if seat.clean is None else self.cleans
            name, shown, offset = names.get(seat.number), seat.shown, seat.offset
            if isinstance(step, Sample):
                name = self.copies[seat.number] if step.own else ("canonical", seat.number)
                shown, offset = step.base, step.base.home.distance(seat.spot)
            wanted.append(Stand(name, offset, seat.length))
            patches.append(shown.patch.bytes if shown.patch else 0)
        pairs = enumerate(zip(self.here, wanted, strict=False))
        same = next((i for i, (old, new) in pairs if old != new), min(len(self.here), len(wanted)))
        coming = wanted[same:]  # those before it stay as they are
        self.written += bytes_of(moves(self.here[same:], coming), coming, self.phased, patches[same:])
        self.here = wanted
