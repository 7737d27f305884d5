"""What a window operation did, counted where it happened."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kamera.backbones import Backbone
from kamera.window.slots import Slot


@dataclass(frozen=True)
class Report:
    """One operation's outcome and cost.

    ``slot`` is the slot that arrived or left (the last of several), ``slots`` the window's slots after
    it, ``evicted`` those that left. ``forwards``, ``tokens_recomputed`` (tokens run through the
    decoder) and ``vision_encodes`` are counted by hooks on the model, bytes where they are written.
    ``notes`` say what was refused on the way (a damaged patch, say).
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


@dataclass(eq=False)
class Tally:
    """Running counts of one operation."""

    forwards: int = 0
    tokens: int = 0
    vision_encodes: int = 0
    bytes_rotated: int = 0
    bytes_patched: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def report(
        self, operation: str, slot: Slot | None, slots: tuple[Slot, ...], evicted: tuple[Slot, ...] = ()
    ) -> Report:
        """The finished report."""
        return Report(
            operation,
            slot,
            slots,
            evicted,
            self.forwards,
            self.tokens,
            self.vision_encodes,
            self.bytes_rotated,
            self.bytes_patched,
            self.seconds,
            tuple(self.notes),
        )


@contextmanager
def counting(backbone: Backbone) -> Iterator[Tally]:
    """Count one operation's model work and time into a tally."""
    tally = Tally()
    started = time.perf_counter()
    with backbone.measure() as work:
        yield tally
    tally.forwards, tally.tokens = work.forwards, work.tokens
    tally.vision_encodes = work.vision_encodes
    tally.seconds = time.perf_counter() - started
