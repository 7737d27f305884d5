"""A window without its tensors: the place, the source KV and the guarantee of each chunk."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add, sub

from kamera.ops import digest
from kamera.patches import Facts
from kamera.store import chunks_of, survivor_id
from kamera.trust import Guarantee, weakest

Offset = tuple[int, ...]
"""Whole positions, one number per axis."""

_DERIVED = ("chunk_ids", "lengths", "lineage", "worths")
_numbers = itertools.count(1)


def new_number() -> int:
    """A seat number that was never used."""
    return next(_numbers)


@dataclass(frozen=True)
class Spot:
    """The place of a chunk: its lowest and its highest position on each axis.

    ``shape`` identifies the positions of its tokens relative to each other: "" as behind the anchor alone. A
    chunk moves as a whole only between spots of one shape.
    """

    low: Offset
    high: Offset
    shape: str = ""

    def shift(self, by: Sequence[int]) -> Spot:
        """The spot moved ``by`` positions per axis."""
        if not any(by):
            return self
        return Spot(tuple(map(add, self.low, by)), tuple(map(add, self.high, by)), self.shape)

    def offset(self, other: Spot) -> Offset | None:
        """The offset from here to ``other``; None if it is not one number per axis."""
        if self.shape != other.shape:
            return None
        return tuple(map(sub, other.low, self.low))

    def distance(self, other: Spot) -> Offset:
        """`offset` to where a chunk was placed."""
        offset = self.offset(other)
        assert offset is not None, "a plan seats no chunk where it cannot stand"
        return offset

    @property
    def top(self) -> int:
        """The highest position on any axis."""
        return max(self.high)


@dataclass(frozen=True)
class Offer:
    """A patch that conditions a canonical: its guarantee, the antecedents it is stored under, its formation.

    ``base``: the anchor of the canonical that it is added to, "" for the window's own. ``error`` and
    ``created`` as in its row; None for one that the plan forms.
    """

    guarantee: Guarantee
    antecedents: tuple[str, ...]
    kind: str
    formed: str | None
    note: str = ""
    base: str = ""
    error: float | None = None
    created: float | None = None


@dataclass(frozen=True)
class Source:
    """KV that the model computed at ``home``, and its antecedents, of ``behind`` tokens together; see `Copy`.

    ``patch``: it conditions the KV.
    """

    home: Spot
    antecedents: tuple[str, ...]
    guarantee: Guarantee
    canonical: bool
    lossy: bool = False
    patch: Offer | None = None
    behind: int = 0

    def with_patch(self, patch: Offer, behind: int = 0) -> Source:
        """The same KV, conditioned on antecedents of ``behind`` tokens (0: not known)."""
        changed = replace(self, guarantee=patch.guarantee, antecedents=patch.antecedents, patch=patch)
        return replace(changed, behind=behind)

    def departed(self, before: Mapping[str, int]) -> float:
        """Share of its antecedents' tokens that are not ``before`` it (lengths by chunk id)."""
        there = sum([before.get(chunk_id, 0) for chunk_id in set(self.antecedent_ids)])
        return max(0.0, 1.0 - there / self.behind) if self.behind else 0.0

    def known(self, before: Mapping[str, int]) -> float:
        """Share of the tokens ``before`` it that it was conditioned on; 1.0 if there are none."""
        antecedents, total = set(self.antecedent_ids), sum(before.values())
        there = sum([length for chunk_id, length in before.items() if chunk_id in antecedents])
        return there / total if total else 1.0

    @cached_property
    def antecedent_ids(self) -> tuple[str, ...]:
        """Ids of its antecedents, whatever these remember."""
        return chunks_of(self.antecedents)

    @cached_property
    def lineage(self) -> str:
        """Digest of its antecedents, and of theirs in turn."""
        return digest("kamera.lineage.v1", *self.antecedents)[:32]


@dataclass(frozen=True)
class Seat:
    """A chunk in a window: its place, its source KV, and the guarantee of that KV here.

    ``formed`` is the weakest guarantee it was prefilled behind, ``clean`` the canonical shown instead while
    conditioning is switched off.
    """

    chunk_id: str
    length: int
    spot: Spot
    source: Source
    guarantee: Guarantee
    formed: Guarantee = "exact"
    archived: bool = True
    clean: Source | None = None
    number: int = field(default_factory=new_number)

    @cached_property
    def shown(self) -> Source:
        """The source of the live KV."""
        return self.source if self.clean is None else self.clean

    @cached_property
    def offset(self) -> Offset:
        """The offset of the live KV from where it was computed."""
        return self.shown.home.distance(self.spot)

    def worth(self, leading: bool, frame: Sequence[int]) -> Guarantee:
        """Guarantee of the KV it shows; an unconditioned canonical is exact at home, else blind.

        Home is right behind the anchor: it attended to the anchor from there. Decoded from codes it is
        patched there: nothing is missing, but it is not quite equal.
        """
        source = self.shown
        if source.canonical and not source.patch:
            at_home = leading and self.spot == source.home.shift(frame)
            return ("patched" if source.lossy else "exact") if at_home else "blind"
        return self.guarantee

    def relabel(self, guarantee: Guarantee) -> Seat:
        """The same KV under another guarantee."""
        return self if guarantee == self.guarantee else replace(self, guarantee=guarantee)

    def at(self, spot: Spot) -> Seat:
        """The same chunk at another spot."""
        return self if spot == self.spot else replace(self, spot=spot)


@dataclass(frozen=True)
class Seats:
    """The chunks of a window in order.

    ``frame`` (per axis) is the offset of the live KV of anchor and chunks, and of the questions behind it,
    from the window's own positions. Attention depends on differences of positions only, so a frame changes
    only which keys have to be rotated: when the oldest chunk leaves, the anchor moves up to the survivors,
    and none of them moves.

    ``said`` is the last question and its answer, right behind the chunks: no chunk, but the next text that
    begins with the same tokens takes over their KV. Any change of the window drops it.
    """

    seats: tuple[Seat, ...]
    frame: Offset
    said: Seat | None = None

    @classmethod
    def home(cls, seats: Sequence[Seat], axes: int) -> Seats:
        """Chunks at their own positions: no frame."""
        return cls(tuple(seats), (0,) * axes)

    def with_said(self, said: Seat | None) -> Seats:
        """The same seats with ``said`` behind them. What is known of them is not found anew."""
        if said is self.said:
            return self
        seats = replace(self, said=said)
        seats.__dict__.update({name: self.__dict__[name] for name in _DERIVED if name in self.__dict__})
        return seats

    def with_seat(self, seat: Seat) -> Seats:
        """The seats with one more at the tail. What is known of the others is not found anew."""
        seats, cache = Seats((*self.seats, seat), self.frame), self.__dict__
        if "chunk_ids" in cache:
            seats.__dict__["chunk_ids"] = (*self.chunk_ids, seat.chunk_id)
        if "lengths" in cache:
            seats.__dict__["lengths"] = {**self.lengths, seat.chunk_id: seat.length}
        if "worths" in cache:
            seats.__dict__["worths"] = (*self.worths, seat.worth(not self.seats, self.frame))
        if "lineage" in cache:
            seats.__dict__["lineage"] = (*self.lineage, _name(seat, self.lineage))
        return seats

    @cached_property
    def chunk_ids(self) -> tuple[str, ...]:
        """Ids of the chunks in order."""
        return tuple([seat.chunk_id for seat in self.seats])

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The tokens of each chunk, by its id."""
        return {seat.chunk_id: seat.length for seat in self.seats}

    @property
    def tokens(self) -> int:
        """The tokens of all chunks."""
        return sum([seat.length for seat in self.seats])

    @cached_property
    def lineage(self) -> tuple[str, ...]:
        """The chunks in order, named as antecedents of the next one; a survivor's name tells its lineage.

        A chunk goes by its id while its KV is conditioned on exactly the chunks before it here. A chunk that
        is conditioned on others has a digest of those after its id.
        """
        names: tuple[str, ...] = ()
        for seat in self.seats:
            names = (*names, _name(seat, names))
        return names

    @cached_property
    def worths(self) -> tuple[Guarantee, ...]:
        """The present guarantee of each chunk."""
        return tuple([seat.worth(i == 0, self.frame) for i, seat in enumerate(self.seats)])


def _name(seat: Seat, before: tuple[str, ...]) -> str:
    """The name of a chunk behind those named ``before``; see `Seats.lineage`."""
    source = seat.shown
    return seat.chunk_id if source.antecedents == before else survivor_id(seat.chunk_id, source.lineage)


GLUE = 64
"""Tokens below which a conversation's text is not kept by itself: the tags of a template, a question.

It runs in the forward of its neighbours, which it makes no longer. Its canonical and a patch would
each take a forward of their own, and files and look-ups that cost more than they ever save.
"""

_WHEN_AN_ANTECEDENT_LEAVES: dict[Guarantee, Guarantee] = {
    "exact": "survivor",
    "patched": "survivor",
    "survivor": "survivor",
    "orbit": "near",
    "near": "near",
    "blind": "blind",
}


def is_glue(facts: Facts) -> bool:
    """True for a text of fewer than `GLUE` tokens."""
    return facts.length < GLUE and not (facts.encoded.tensors or facts.position_inputs)


def survivor_of(seat: Seat) -> Seat:
    """A chunk that stays as it is while an antecedent leaves."""
    return seat.relabel(_WHEN_AN_ANTECEDENT_LEAVES[seat.guarantee])


def staying_behind(seat: Seat, before: Seats) -> Seat:
    """A chunk that stays as it is while its antecedents change.

    One with the patch of its predecessor is patched once just that stands before it.
    """
    if seat.source.antecedents != before.lineage:
        return survivor_of(seat)
    is_near = seat.guarantee == "near" and seat.source.patch is not None and bool(before.seats)
    return seat.relabel("patched") if is_near else seat


def footing(before: Seats) -> Guarantee:
    """The weakest guarantee among the KV that a chunk here attends to."""
    return weakest(before.worths)
