"""The state that an operation replaces as a whole, so an error leaves the old one in place."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import SupportsIndex

import torch

from kamera.content import Encoded
from kamera.engines import Span
from kamera.errors import InvalidPermutation, UnknownSlot, quote
from kamera.ops import KV
from kamera.patches import Copy, Facts
from kamera.trust import Guarantee, Proof
from kamera.window.seats import Seat, Seats


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
class ShownSpan:
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
            rank = 0 if seat.shown.canonical and not leading else None
        return Slot(
            chunk_id=seat.chunk_id,
            start=start,
            length=seat.length,
            guarantee=worth,
            antecedents=seat.shown.antecedent_ids,
            rank=rank,
            bytes=seat.length * bytes_per_token,
            number=seat.number,
            position=seat.spot.low[0] - frame,
            conditioned=self.clean is None,
            label=self.facts.label,
            proof=seat.shown.proof,
            share=None if sample is None else sample.tokens / seat.length,
            error=None if sample is None else sample.error,
        )


def moved(positions: torch.Tensor, offset: Sequence[int]) -> torch.Tensor:
    """Positions ``[axes, tokens]`` all moved by one offset per axis."""
    return positions + torch.tensor(offset, dtype=positions.dtype)[:, None] if any(offset) else positions


@dataclass(frozen=True, eq=False)
class WindowState:
    """The chunks of a window in order.

    ``frame`` (per axis) is the offset of the live KV of anchor and chunks, and of the questions behind it,
    from the window's own positions. Attention depends on differences of positions only, so a frame changes
    only which keys have to be rotated: when the oldest chunk leaves, the anchor moves up to the survivors,
    and none of them moves.

    ``said`` is the last question and its answer, right behind the chunks: no chunk, but the next text that
    begins with the same tokens takes over their KV. Any change of the window drops it.
    """

    residents: tuple[Resident, ...]
    frame: tuple[int, ...]
    said: Resident | None = None

    @classmethod
    def of(cls, residents: Sequence[Resident], axes: int) -> WindowState:
        """Chunks at their own positions: no frame."""
        return cls(tuple(residents), (0,) * axes)

    @property
    def residents_by_number(self) -> dict[int, Resident]:
        """The chunks by their numbers."""
        return {r.seat.number: r for r in self.residents}

    @cached_property
    def _places(self) -> dict[int, int]:
        return {resident.seat.number: i for i, resident in enumerate(self.residents)}

    @cached_property
    def seats(self) -> Seats:
        """The same state without tensors."""
        said = None if self.said is None else self.said.seat
        return Seats(tuple([r.seat for r in self.residents]), self.frame, said)

    def saying(self, said: Resident) -> WindowState:
        """The same chunks with ``said`` behind them."""
        made = WindowState(self.residents, self.frame, said)
        made.__dict__["seats"] = self.seats.saying(said.seat)
        return made

    @property
    def chunk_ids(self) -> tuple[str, ...]:
        """Ids of the chunks in order."""
        return self.seats.chunk_ids

    @property
    def worths(self) -> tuple[Guarantee, ...]:
        """The present guarantee of each chunk."""
        return self.seats.worths

    def slots(self, anchor_length: int, bytes_per_token: int) -> tuple[Slot, ...]:
        """The public view, in order."""
        start, out, worths = anchor_length, [], self.worths
        for i, resident in enumerate(self.residents):
            out.append(resident.slot(start, worths[i], i == 0, self.frame[0], bytes_per_token))
            start += resident.seat.length
        return tuple(out)

    def index(self, slot: Slot | int) -> int:
        """Index of a slot among the chunks. Raises UnknownSlot if it is not one of them."""
        count = len(self.residents)
        if not count:
            raise UnknownSlot("the window is empty, it has no slots: append or recall a chunk first")
        if isinstance(slot, Slot):
            if (i := self._places.get(slot.number)) is not None:
                return i
            raise UnknownSlot(
                f"slot {slot.number} (chunk {slot.chunk_id[:12]}) is not in this window: it has left; "
                "use recall(chunk_id)"
            )
        if not isinstance(slot, int) or isinstance(slot, bool):
            raise UnknownSlot(f"{quote(slot)} is no slot: give a Slot of this window or its index")
        if not -count <= slot < count:
            raise UnknownSlot(f"slot {slot} of a window of {count}: give 0..{count - 1}")
        return slot % count


def indices(permutation: Iterable[SupportsIndex]) -> list[int]:
    """Whole numbers out of any sequence of them (a list, an array). Raises InvalidPermutation for others."""
    try:
        given = list(permutation)
    except TypeError:
        raise InvalidPermutation(f"{quote(permutation)} is no permutation: give a list of indices") from None
    found = []
    for i in given:
        try:
            if isinstance(i, bool) or isinstance(permutation, bytes):
                raise TypeError
            found.append(operator.index(i))
        except TypeError:
            raise InvalidPermutation(f"{quote(i)} in a permutation is no index: give whole numbers") from None
    return found
