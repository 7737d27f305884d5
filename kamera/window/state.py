"""The state that an operation replaces as a whole, so an error leaves the old one in place."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import SupportsIndex

import torch

from kamera.content import Encoded
from kamera.engines import Span
from kamera.errors import InvalidPermutation, UnknownSlot, quote
from kamera.ops import KV
from kamera.patches import Copy, Facts
from kamera.trust import Guarantee
from kamera.window.seats import Seat, Seats


@dataclass(frozen=True)
class Slot:
    """A chunk's place in a window, and the guarantee of its KV there.

    ``start`` is the first token's index in the window's sequence (anchor included), ``position`` its rotary
    position on the first axis, ``antecedents`` the chunks its KV is conditioned on (for a survivor those of
    its prefill, departed ones included), ``rank`` that of its patch (None: prefilled, nothing truncated; 0:
    no conditioning), ``bytes`` those of its live KV. ``error`` is that of its patch: the share of the
    deficit's energy that it leaves out, in the worst layer and channel (of an orbit patch, over its
    orderings); None without a patch, or if it is not said. ``departed`` is the share of its antecedents'
    tokens that have left the window since, ``known`` the share of the tokens before it (the system prompt
    aside) that it was conditioned on. ``number`` names the slot for the life of the window and its forks.
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
    error: float | None = None
    departed: float = 0.0
    known: float = 1.0


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
    """The tensors of a chunk in a window, which its forks share; its seat holds all that plans use.

    ``clean`` is the canonical shown instead of ``copy`` while conditioning is switched off.
    """

    facts: Facts
    copy: Copy
    clean: Copy | None = None

    @property
    def shown(self) -> Copy:
        """The copy from which the live KV is written."""
        return self.copy if self.clean is None else self.clean


def span_of(seat: Seat, tensors: Resident) -> Span:
    """The span of the copy that a seat shows, moved to it."""
    copy = tensors.copy if seat.clean is None else tensors.clean
    assert copy is not None, "a clean view has its copy"
    return Span(copy.kv, copy.patch, seat.offset)


def shift(positions: torch.Tensor, offset: Sequence[int]) -> torch.Tensor:
    """Positions ``[axes, tokens]`` all moved by one offset per axis."""
    return positions + torch.tensor(offset, dtype=positions.dtype)[:, None] if any(offset) else positions


@dataclass(frozen=True, eq=False)
class WindowState:
    """The chunks of a window: their seats in order, and their tensors by the numbers of these."""

    seats: Seats
    tensors: Mapping[int, Resident]

    @classmethod
    def empty(cls, axes: int) -> WindowState:
        """No chunks."""
        return cls(Seats((), (0,) * axes), {})

    @cached_property
    def residents(self) -> tuple[Resident, ...]:
        """The tensors of the chunks in order."""
        return tuple([self.tensors[seat.number] for seat in self.seats.seats])

    @cached_property
    def facts(self) -> tuple[Facts, ...]:
        """The chunks in order, independent of their places."""
        return tuple([resident.facts for resident in self.residents])

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of the chunks: the copies that they show, moved to their seats."""
        return tuple(map(span_of, self.seats.seats, self.residents))

    @property
    def positions(self) -> list[torch.Tensor]:
        """Positions of the live KV of each chunk, ``[axes, tokens]``."""
        pairs = zip(self.residents, self.spans, strict=True)
        return [shift(resident.shown.positions, span.offset) for resident, span in pairs]

    @property
    def said(self) -> Resident | None:
        """The tensors of `Seats.said`."""
        return None if self.seats.said is None else self.tensors[self.seats.said.number]

    def with_said(self, said: Seat, tensors: Resident) -> WindowState:
        """The same chunks with ``said`` behind them."""
        return WindowState(self.seats.with_said(said), {**self.tensors, said.number: tensors})

    @cached_property
    def _places(self) -> dict[int, int]:
        return {seat.number: i for i, seat in enumerate(self.seats.seats)}

    def slots(self, anchor_length: int, bytes_per_token: int) -> tuple[Slot, ...]:
        """The public view, in order."""
        start, out, worths, before = anchor_length, [], self.seats.worths, dict[str, int]()
        for i, seat in enumerate(self.seats.seats):
            source, patch = seat.shown, self.residents[i].shown.patch
            out.append(
                Slot(
                    chunk_id=seat.chunk_id,
                    start=start,
                    length=seat.length,
                    guarantee=worths[i],
                    antecedents=source.antecedent_ids,
                    rank=patch.rank if patch is not None else 0 if source.canonical and i else None,
                    bytes=seat.length * bytes_per_token,
                    number=seat.number,
                    position=seat.spot.low[0] - self.seats.frame[0],
                    conditioned=seat.clean is None,
                    label=self.facts[i].label,
                    error=None if source.patch is None else source.patch.error,
                    departed=source.departed(before),
                    known=source.known(before),
                )
            )
            start += seat.length
            before[seat.chunk_id] = seat.length
        return tuple(out)

    def index(self, slot: Slot | int) -> int:
        """Index of a slot among the chunks. Raises UnknownSlot if it is not one of them."""
        count = len(self.seats.seats)
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
        items = list(permutation)
    except TypeError:
        raise InvalidPermutation(f"{quote(permutation)} is no permutation: give a list of indices") from None
    numbers = []
    for i in items:
        try:
            if isinstance(i, bool) or isinstance(permutation, bytes):
                raise TypeError
            numbers.append(operator.index(i))
        except TypeError:
            raise InvalidPermutation(f"{quote(i)} in a permutation is no index: give whole numbers") from None
    return numbers
