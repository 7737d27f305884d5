"""Reports of window operations, counted where the work is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from kamera.engines import Engine, Work, Written
from kamera.window.state import Slot


class Times(NamedTuple):
    """Seconds of an operation by part.

    ``plan``: contents become chunks, rows are looked up, the plan is made. ``encode``: new pictures go
    through the vision tower. ``run``: the plan's forwards, reads and puts. ``show``: the live KV is written.
    """

    plan: float = 0.0
    encode: float = 0.0
    run: float = 0.0
    show: float = 0.0


@dataclass(frozen=True, repr=False)
class Report:
    """One operation's outcome and cost.

    ``slot`` is the slot that arrived or left (the last of several; None after a reorder), ``slots`` the
    window's slots after it, ``evicted`` those that left. ``forwards``, ``tokens_recomputed`` (tokens run
    through the decoder) and ``vision_encodes`` are counted by hooks on the model, bytes where they are
    written. ``tokens_held`` are those of new texts whose KV stood where they need it: the beginning of an
    edited text, or what was said behind the window (`respond`). ``times`` are parts of
    ``seconds``; an answer's own time is in neither.
    ``notes`` name objects that were refused (a damaged patch, say) or not stored (on a full disk, say).
    """

    operation: str
    slot: Slot | None
    slots: tuple[Slot, ...]
    evicted: tuple[Slot, ...]
    forwards: int
    tokens_recomputed: int
    vision_encodes: int
    bytes_rotated: int
    bytes_patched: int
    seconds: float
    notes: tuple[str, ...] = ()
    tokens_held: int = 0
    times: Times = field(default_factory=Times)

    def __repr__(self) -> str:
        counts = {
            "forwards": self.forwards,
            "tokens recomputed": self.tokens_recomputed,
            "vision encodes": self.vision_encodes,
            "bytes rotated": self.bytes_rotated,
            "bytes patched": self.bytes_patched,
            "evicted": len(self.evicted),
            "notes": len(self.notes),
        }
        where = "" if self.slot is None else f" {self.slot.chunk_id[:12]} {self.slot.guarantee},"
        costs = "".join(f"{n} {name}, " for name, n in counts.items() if n)
        return f"Report({self.operation}:{where} {len(self.slots)} slots, {costs}{self.seconds:.4f} seconds)"


@dataclass(frozen=True, repr=False)
class SlotReport(Report):
    """The report of an operation on one chunk, or of a slide: there is always a ``slot``."""

    slot: Slot


@dataclass(eq=False)
class Tally:
    """Running counts of one operation."""

    forwards: int = 0
    tokens: int = 0
    tokens_held: int = 0
    vision_encodes: int = 0
    bytes_rotated: int = 0
    bytes_patched: int = 0
    seconds: float = 0.0
    end: float | None = None
    notes: list[str] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    _at: float = field(default_factory=time.perf_counter)

    def count_time(self, part: str) -> None:
        """Count the time since the last call, or since the beginning, to a part of `Times`."""
        now = time.perf_counter()
        end = now if self.end is None else min(self.end, now)
        self.times = self.times._replace(**{part: getattr(self.times, part) + max(0.0, end - self._at)})
        self._at = now

    def add(self, written: Written) -> None:
        """Count bytes that were written."""
        self.bytes_rotated += written.bytes_turned
        self.bytes_patched += written.bytes_patched

    def leave_out(self, work: Work, forwards: int, tokens: int, at: float) -> None:
        """Leave an answer's own work and time out of the operation's.

        Of its ``work``, ``forwards`` and ``tokens`` were the operation's, whose time ends ``at``.
        """
        self.forwards -= work.forwards - forwards
        self.tokens -= work.tokens - tokens
        self.end = at

    def report(
        self, operation: str, slot: Slot | None, slots: tuple[Slot, ...], evicted: tuple[Slot, ...] = ()
    ) -> Report:
        """The finished report."""
        counts = (self.forwards, self.tokens, self.vision_encodes, self.bytes_rotated, self.bytes_patched)
        rest = (slots, evicted, *counts, self.seconds, tuple(self.notes), self.tokens_held, self.times)
        return Report(operation, None, *rest) if slot is None else SlotReport(operation, slot, *rest)


@contextmanager
def count_operation(backbone: Engine) -> Iterator[Tally]:
    """Count one operation's model work and time into a tally."""
    tally = Tally()
    start = time.perf_counter()
    with backbone.measure() as work:
        yield tally
    tally.forwards += work.forwards
    tally.tokens += work.tokens
    tally.vision_encodes = work.vision_encodes
    tally.seconds = (tally.end or time.perf_counter()) - start
