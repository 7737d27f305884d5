"""The chunks of a window: places, sources and guarantees for plans, the tensors behind, the public view.

An operation replaces the state as a whole, so an error leaves the old one in place.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add, sub
from typing import Literal, TypeVar

import torch

from kamera.content import Encoded
from kamera.engines import Engine, Extent, LiveKV, Offset, Span
from kamera.errors import UnknownSlot, quote
from kamera.ops import digest, kv_tensors, tensor_digest
from kamera.patches import Anchor, compact_positions, form_of
from kamera.store import chunks_of, survivor_id
from kamera.trust import Guarantee, weakest

_DERIVED = ("chunk_ids", "lengths", "lineage", "guarantees")
_numbers = itertools.count(1)

Origin = Literal["canonical", "stored", "survivor", "computed"]
"""Where a chunk's KV comes from: its canonical alone; a patch of it, or KV, that is stored for what stands
before it now; one for what stood before it once; or a prefill."""


@dataclass(frozen=True)
class Slot:
    """A chunk's place in a window, and the guarantee of its KV there.

    ``start`` is the first token's index in the window's sequence (anchor included), ``position`` its rotary
    position on the first axis, ``antecedents`` the chunks its KV is conditioned on (for a survivor those of
    its prefill, departed ones included), ``rank`` that of its patch (None: prefilled, nothing truncated, or
    applied by an engine; 0: no conditioning), ``bytes`` those of its live KV in this process. ``error`` is
    that of its patch: the share of the deficit's energy that it leaves out, in the worst layer and channel
    (of an orbit patch, over its orderings); None without a patch, or if it is not said. ``departed`` is the
    share of its antecedents' tokens that have left the window since, ``known`` the share of the tokens before
    it (the system prompt aside) that it was conditioned on. ``number`` names the slot for the life of the
    window and its forks; a window over an engine names all slots anew with each operation. ``origin`` says
    where its KV comes from, "" if a trace tells of it.
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
    origin: Origin | Literal[""] = field(default="", compare=False)


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
    """KV that the model computed at ``home``, and its antecedents, of ``behind`` tokens together; see `Span`.

    ``patch``: it conditions the KV. ``content``: the ``base`` under which a store has KV of an engine that is
    no canonical; "" for any other.
    """

    home: Spot
    antecedents: tuple[str, ...]
    guarantee: Guarantee
    canonical: bool
    lossy: bool = False
    patch: Offer | None = None
    behind: int = 0
    content: str = ""

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


_WHEN_AN_ANTECEDENT_LEAVES: dict[Guarantee, Guarantee] = {
    "exact": "survivor",
    "patched": "survivor",
    "survivor": "survivor",
    "orbit": "near",
    "near": "near",
    "blind": "blind",
}


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

    @property
    def origin(self) -> Origin:
        """Where the KV that it shows comes from."""
        if not (self.shown.canonical or self.shown.content):
            return "computed"
        if self.shown.canonical and self.shown.patch is None:
            return "canonical"
        return "survivor" if self.guarantee == "survivor" else "stored"

    @cached_property
    def offset(self) -> Offset:
        """The offset of the live KV from where it was computed."""
        return self.shown.home.distance(self.spot)

    def guarantee_here(self, leading: bool, frame: Sequence[int]) -> Guarantee:
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

    def staying(self, before: Seats) -> Seat:
        """The chunk as it is, while its antecedents change to those ``before`` it.

        One with the patch of its predecessor is patched once just that stands before it.
        """
        if self.source.antecedents != before.lineage:
            return self.relabel(_WHEN_AN_ANTECEDENT_LEAVES[self.guarantee])
        is_near = self.guarantee == "near" and self.source.patch is not None and bool(before.seats)
        return self.relabel("patched") if is_near else self


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
        if "guarantees" in cache:
            seats.__dict__["guarantees"] = (*self.guarantees, seat.guarantee_here(not self.seats, self.frame))
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
    def guarantees(self) -> tuple[Guarantee, ...]:
        """The present guarantee of each chunk."""
        return tuple([seat.guarantee_here(i == 0, self.frame) for i, seat in enumerate(self.seats)])

    @property
    def footing(self) -> Guarantee:
        """The weakest guarantee among the KV that the next chunk attends to."""
        return weakest(self.guarantees)

    def slots(
        self, start: int, labels: Sequence[str], ranks: Sequence[int | None], bytes_per_token: int = 0
    ) -> tuple[Slot, ...]:
        """The public view, in order: the first begins at ``start``; ``ranks`` of patches that are applied."""
        out, before = list[Slot](), dict[str, int]()
        for i, seat in enumerate(self.seats):
            source, canonical = seat.shown, seat.shown.canonical and i > 0
            out.append(
                Slot(
                    chunk_id=seat.chunk_id,
                    start=start,
                    length=seat.length,
                    guarantee=self.guarantees[i],
                    antecedents=source.antecedent_ids,
                    rank=0 if canonical and source.patch is None else ranks[i],
                    bytes=seat.length * bytes_per_token,
                    number=seat.number,
                    position=seat.spot.low[0] - self.frame[0],
                    conditioned=seat.clean is None,
                    label=labels[i],
                    error=None if source.patch is None else source.patch.error,
                    departed=source.departed(before),
                    known=source.known(before),
                    origin=seat.origin,
                )
            )
            start += seat.length
            before[seat.chunk_id] = seat.length
        return tuple(out)


def _name(seat: Seat, before: tuple[str, ...]) -> str:
    """The name of a chunk behind those named ``before``; see `Seats.lineage`."""
    source = seat.shown
    return seat.chunk_id if source.antecedents == before else survivor_id(seat.chunk_id, source.lineage)


GLUE = 64
"""Tokens below which a conversation's text is not kept by itself: the tags of a template, a question.

It runs in the forward of its neighbours, which it makes no longer. Its canonical and a patch would
each take a forward of their own, and files and look-ups that cost more than they ever save.
"""


def is_glue(encoded: Encoded) -> bool:
    """True for a text of fewer than `GLUE` tokens."""
    return encoded.num_tokens < GLUE and encoded.is_text


@dataclass(frozen=True, eq=False)
class Resident:
    """The tensors of a chunk in a window, which its forks share; its seat holds all that plans use.

    ``clean`` is the canonical shown instead of ``span`` while conditioning is switched off.
    """

    encoded: Encoded
    span: Span
    clean: Span | None = None

    @property
    def shown(self) -> Span:
        """The KV from which the live KV is written, where it was computed."""
        return self.span if self.clean is None else self.clean

    def moved(self, seat: Seat) -> Span:
        """The span that its seat shows, moved to it."""
        span = self.span if seat.clean is None else self.clean
        assert span is not None, "a clean view has its KV"
        return span.moved(seat.offset)


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
    def encoded(self) -> tuple[Encoded, ...]:
        """The chunks in order, independent of their places."""
        return tuple([resident.encoded for resident in self.residents])

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans that the chunks show, moved to their seats."""
        pairs = zip(self.residents, self.seats.seats, strict=True)
        return tuple([resident.moved(seat) for resident, seat in pairs])

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
        residents = self.residents
        patches = [resident.shown.patch for resident in residents]
        ranks = [None if patch is None else patch.rank for patch in patches]
        labels = [resident.encoded.label for resident in residents]
        return self.seats.slots(anchor_length, labels, ranks, bytes_per_token)

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


_MOST = 4096  # chunks, at 24 bytes per token
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

_Pattern = tuple[torch.Tensor, Offset]
"""Positions of a chunk's tokens from its lowest one ``[axes, tokens]``, and their maximum per axis."""


class Spots:
    """Spots behind one anchor. Safe to use from several threads: its only state is a cache."""

    def __init__(self, backbone: Engine, anchor: Anchor) -> None:
        self.backbone = backbone
        self.anchor = anchor
        self._patterns: OrderedDict[tuple[str, str], _Pattern] = OrderedDict()
        self._sums: OrderedDict[str, tuple[Offset, Offset]] = OrderedDict()
        self._row: tuple[tuple[str, Spot, Offset], ...] = ()  # ids, places, and where the next one begins

    def spot(self, encoded: Encoded, positions: torch.Tensor) -> Spot:
        """The spot of a chunk at ``positions`` ``[axes, tokens]``."""
        low = positions.amin(1)
        pattern = positions - low[:, None]
        alone = self._pattern(encoded, "")
        shape = "" if torch.equal(pattern, alone[0]) else tensor_digest(pattern)[:16]
        if shape:
            _remember(self._patterns, (encoded.chunk_id, shape), _pattern_of(pattern))
        return _spot(low.tolist(), self._pattern(encoded, shape), shape)

    def positions(self, encoded: Encoded, spot: Spot) -> torch.Tensor:
        """The positions of a chunk at a spot, ``[axes, tokens]``."""
        return self._pattern(encoded, spot.shape)[0] + torch.tensor(spot.low)[:, None]

    def compact(self, chunks: Sequence[Encoded]) -> list[Spot]:
        """Spots of chunks one after another behind the anchor; those that stood so before are known."""
        last, same = self._row, 0
        while same < min(len(last), len(chunks)) and last[same][0] == chunks[same].chunk_id:
            same += 1
        near = chunks[max(0, same - 1) :]  # neighbours may not touch
        extents = self.backbone.extents.of_all(near)
        if extents is None:
            positions = compact_positions(self.backbone, self.anchor.input_ids, chunks)
            return [self.spot(encoded, p) for encoded, p in zip(chunks, positions, strict=True)]
        row = list(last[:same])
        at = row[-1][2] if row else (self.anchor.length,) * self.backbone.axes
        for encoded, extent in zip(chunks[same:], extents[len(extents) - len(chunks) + same :], strict=True):
            low, advance = self._sum(encoded.chunk_id, extent)
            spot = _spot(tuple(map(add, at, low)), self._pattern(encoded, ""), "")
            at = tuple(map(add, at, advance))
            row.append((encoded.chunk_id, spot, at))
        if len(row) > 1:  # a chunk alone is asked for between rows
            self._row = tuple(row)
        return [spot for _, spot, _ in row]

    def form(self, encoded: Encoded) -> Hashable | None:
        """As `form_of`."""
        return form_of(self.backbone, encoded)

    # -- inside --------------------------------------------------------------------------------

    def _pattern(self, encoded: Encoded, shape: str) -> _Pattern:
        key = (encoded.chunk_id, shape)
        pattern = self._patterns.get(key)
        if pattern is None:
            assert not shape, "a shape is remembered when a spot of it is made"
            (alone,) = compact_positions(self.backbone, self.anchor.input_ids, [encoded])
            pattern = _remember(self._patterns, key, _pattern_of(alone - alone.amin(1)[:, None]))
        return pattern

    def _sum(self, chunk_id: str, extent: Extent) -> tuple[Offset, Offset]:
        """Where a chunk's lowest positions are from the start of its span, and where the next span begins."""
        low_and_advance = self._sums.get(chunk_id)
        if low_and_advance is None:
            low, axes = extent.positions.amin(1), self.backbone.axes
            _remember(self._patterns, (chunk_id, ""), _pattern_of(extent.positions - low[:, None]))
            low_and_advance = tuple(low.tolist()), tuple(extent.advance.expand(axes, 1)[:, 0].tolist())
            _remember(self._sums, chunk_id, low_and_advance)
        return low_and_advance


def _pattern_of(pattern: torch.Tensor) -> _Pattern:
    return pattern, tuple(pattern.amax(1).tolist())


def _spot(low: Sequence[int], pattern: _Pattern, shape: str) -> Spot:
    return Spot(tuple(low), tuple(map(add, low, pattern[1])), shape)


def _remember(cache: OrderedDict[_Key, _Value], key: _Key, value: _Value) -> _Value:
    cache[key] = value
    while len(cache) > _MOST:
        cache.popitem(last=False)
    return value


Storages = dict[tuple[torch.device, int], int]
"""Bytes of memory blocks by device and address; a block counts once, however many tensors share it."""


@dataclass(frozen=True)
class WindowMemory:
    """Bytes a window holds.

    ``live`` is the allocation of its live cache, including the free part behind the last token; ``copies``
    are the KV, patches and positions that every move starts from, the anchor's among them; ``encodings`` the
    inputs from which chunks are prefilled again. ``shared`` is the part of the total that forks hold too:
    each fork counts it, and it is in memory once. The store's own memory is not counted.
    """

    live: int
    copies: int
    encodings: int
    shared: int

    @property
    def total(self) -> int:
        """All bytes: live cache, copies and encodings."""
        return self.live + self.copies + self.encodings

    @property
    def own(self) -> int:
        """Bytes that are freed when this window alone is gone."""
        return self.total - self.shared


Holdings = tuple[Storages, Storages, Storages]
"""The blocks of memory that a window holds, each of them once: its live cache, its copies, its encodings."""


def holdings_of(anchor: Anchor, state: WindowState, live: LiveKV) -> Holdings:
    """The blocks of an anchor, a state and a live cache."""
    room = _storages(kv_tensors(live.tensors))
    tensors = [anchor.input_ids, anchor.positions, *kv_tensors(anchor.kv)]
    inputs: list[torch.Tensor] = []
    for resident in (*state.residents, *(() if state.said is None else (state.said,))):
        for span in (resident.span, resident.clean):
            tensors.extend(() if span is None else _parts(span))
        encoded = resident.encoded
        inputs += [encoded.input_ids, *encoded.position_inputs.values(), *encoded.tensors.values()]
    copies = {k: n for k, n in _storages(tensors).items() if k not in room}
    rest = {k: n for k, n in _storages(inputs).items() if k not in room and k not in copies}
    return room, copies, rest


def memory_held(own: Holdings, others: Iterable[Holdings] = ()) -> WindowMemory:
    """The sums of bytes of ``own``; ``others`` are what its forks hold."""
    shared = set[tuple[torch.device, int]]().union(*(part for other in others for part in other))
    live, copies, encodings = (sum(part.values()) for part in own)
    return WindowMemory(
        live, copies, encodings, sum(n for part in own for k, n in part.items() if k in shared)
    )


def _storages(tensors: Iterable[torch.Tensor]) -> Storages:
    blocks = ((t.device, t.untyped_storage()) for t in tensors)
    return {(device, block.data_ptr()): block.nbytes() for device, block in blocks if block.nbytes()}


def _parts(span: Span) -> Iterator[torch.Tensor]:
    yield span.positions
    yield from kv_tensors(span.kv)
    yield from () if span.patch is None else span.patch.tensors()
