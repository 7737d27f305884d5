"""Slots: a chunk's place in a window, as users see it and as the window holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from kamera.content import Encoded
from kamera.engines import Span
from kamera.ops import KV, Proof
from kamera.patches import Copy, Facts, Guarantee
from kamera.window.seats import Seat


@dataclass(frozen=True)
class Slot:
    """A chunk's place in a window, and the guarantee of its KV there.

    ``start`` is the first token's index in the window's sequence (anchor included), ``position`` its
    rotary position on the first axis, ``antecedents`` the chunks its KV is conditioned on (for a
    survivor those of its prefill, departed ones included), ``rank`` that of its patch (None: prefilled,
    nothing truncated; 0: no conditioning), ``bytes`` those of its live KV, ``proof`` that of a patch which is
    served for it (`ReusePolicy.tolerance`). Of a sampled chunk ``share`` is the share of its tokens that were
    run behind its antecedents, ``error`` what the completion of the others is estimated to miss
    (`ReusePolicy.share`).
    ``number`` names the slot for the life of the window and its forks.
    """

    chunk_id: str
    start: int
    length: int
    guarantee: Guarantee
    antecedents: tuple[str, ...]
    rank: int | None
    bytes: int
    number: int
    position: int
    conditioned: bool
    label: str
    proof: Proof | None = None
    share: float | None = None
    error: float | None = None


@dataclass(frozen=True, eq=False)
class Shown:
    """A span as the live cache shows it: its decoder inputs, positions ``[axes, tokens]``, and KV.

    ``kv`` is a copy, by layer and channel ``[heads, tokens, dim]``. Its phase is that of ``positions``, which
    a slide may move as a whole against the window's own.
    """

    encoded: Encoded
    positions: torch.Tensor
    kv: KV


@dataclass(frozen=True, eq=False)
class Resident:
    """A chunk in a window, with its tensors. Immutable, so forks share it until one of them changes its own.

    ``seat`` holds all that plans use, ``clean`` is the canonical shown instead while conditioning is switched
    off.
    """

    facts: Facts
    seat: Seat
    copy: Copy
    clean: Copy | None = None

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee of its KV while it is conditioned."""
        return self.seat.guarantee

    @property
    def number(self) -> int:
        """Number of its slot for the life of the window and its forks."""
        return self.seat.number

    @cached_property
    def shown(self) -> Copy:
        """The copy from which the live KV is written."""
        return self.copy if self.clean is None else self.clean

    @cached_property
    def span(self) -> Span:
        """The span of the shown copy, moved to its seat."""
        offset = self.seat.offset
        assert offset is not None, "a plan seats no chunk where it cannot stand"
        return Span(self.shown.kv, self.shown.patch, offset)

    @property
    def positions(self) -> torch.Tensor:
        """Positions of its live KV, ``[axes, tokens]``: those of the window, moved by the state's frame."""
        return moved(self.shown.positions, self.span.offset)

    def slot(self, start: int, worth: Guarantee, leading: bool, frame: int, bytes_per_token: int) -> Slot:
        """The public view; ``frame`` is that of the first axis."""
        shown, seat = self.shown, self.seat
        sample = seat.shown.sample
        if shown.patch is not None:
            rank: int | None = shown.patch.rank
        else:
            rank = 0 if shown.canonical and not leading else None
        return Slot(
            chunk_id=seat.chunk_id,
            start=start,
            length=seat.length,
            guarantee=worth,
            antecedents=seat.shown.chunk_ids,
            rank=rank,
            bytes=seat.length * bytes_per_token,
            number=seat.number,
            position=seat.spot.low[0] - frame,
            conditioned=self.clean is None,
            label=self.facts.label,
            proof=shown.proof,
            share=None if sample is None else sample.tokens / seat.length,
            error=None if sample is None else sample.error,
        )


def moved(positions: torch.Tensor, offset: Sequence[int]) -> torch.Tensor:
    """Positions ``[axes, tokens]`` all moved by one offset per axis."""
    return positions + torch.tensor(offset, dtype=positions.dtype)[:, None] if any(offset) else positions
