"""Slots: a chunk's place in a window, as users see it and as the window holds it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from kamera.backbones import Encoded
from kamera.ops import KV, Patch
from kamera.ops.digest import digest
from kamera.store.keys import chunk_of
from kamera.window.policy import Guarantee

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Slot:
    """A chunk's place in a window, and what its KV there is worth.

    ``start`` is the first token's index in the window's sequence (anchor included), ``position`` its
    rotary position on the first axis, ``antecedents`` the chunks its KV is conditioned on (for a
    survivor those of its prefill, departed ones included), ``rank`` that of its patch (None: prefilled,
    nothing truncated; 0: no conditioning), ``bytes`` those of its live KV. ``number`` names the slot
    for the life of the window and its forks.
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


@dataclass(frozen=True, eq=False)
class Facts:
    """What a chunk is, apart from any place: enough to prefill it again without its pixels."""

    chunk_id: str
    encoded: Encoded
    label: str

    @property
    def length(self) -> int:
        """Tokens."""
        return self.encoded.num_tokens

    @property
    def position_inputs(self) -> Mapping[str, torch.Tensor]:
        """What fixes its positions besides token ids."""
        return self.encoded.position_inputs


@dataclass(frozen=True, eq=False)
class Copy:
    """A KV the model computed somewhere, never turned since; every move starts from it.

    ``kv`` stands at ``positions`` ``[axes, tokens]``; ``patch`` conditions it when it is a canonical.
    ``guarantee`` is what it is worth behind exactly ``antecedents``, which are named as in
    `WindowState.lineage`. ``lossy`` says that it came out of codes: it is close to what the model computed,
    never equal.
    """

    kv: KV
    positions: torch.Tensor
    patch: Patch | None
    guarantee: Guarantee
    antecedents: tuple[str, ...]
    canonical: bool
    lossy: bool = False

    @cached_property
    def lineage(self) -> str:
        """Digest of what it is conditioned on, and of what that was conditioned on in its turn."""
        return digest("kamera.lineage.v1", *self.antecedents)[:32]


class Span(NamedTuple):
    """A copy and how far from its own positions (per axis) it is to stand."""

    copy: Copy
    offset: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens."""
        return self.copy.positions.shape[1]

    def same_source(self, other: Span) -> bool:
        """Whether both are written from the same tensors."""
        return self.copy.kv is other.copy.kv and self.copy.patch is other.copy.patch


@dataclass(frozen=True, eq=False)
class Resident:
    """A chunk in a window. Immutable, so forks share it until one of them changes its own.

    ``positions`` ``[axes, tokens]`` are where its live KV stands: those of the window, moved by the
    state's frame.
    """

    facts: Facts
    copy: Copy
    positions: torch.Tensor
    guarantee: Guarantee
    formed: Guarantee = "exact"  # the weakest KV it was prefilled behind
    archived: bool = True
    clean: Copy | None = None  # the canonical shown instead while conditioning is switched off
    number: int = field(default_factory=lambda: next(_numbers))

    @cached_property
    def _lowest(self) -> int:
        return int(self.positions[0].min())

    @property
    def shown(self) -> Copy:
        """The copy the live KV is written from."""
        return self.copy if self.clean is None else self.clean

    def worth(self, leading: bool, frame: Sequence[int]) -> Guarantee:
        """What the KV it shows is worth; an unconditioned canonical is exact at home, else blind.

        Home is right behind the anchor: it attended to the anchor from there. Out of codes it is
        patched there: nothing is missing, and it is not quite equal.
        """
        if self.shown.canonical and self.shown.patch is None:
            at_home = leading and torch.equal(self.positions, moved(self.shown.positions, frame))
            return ("patched" if self.shown.lossy else "exact") if at_home else "blind"
        return self.guarantee

    def slot(self, start: int, leading: bool, frame: Sequence[int], bytes_per_token: int) -> Slot:
        """The public view."""
        shown = self.shown
        if shown.patch is not None:
            rank: int | None = shown.patch.rank
        else:
            rank = 0 if shown.canonical and not leading else None
        return Slot(
            chunk_id=self.facts.chunk_id,
            start=start,
            length=self.facts.length,
            guarantee=self.worth(leading, frame),
            antecedents=tuple(map(chunk_of, shown.antecedents)),
            rank=rank,
            bytes=self.facts.length * bytes_per_token,
            number=self.number,
            position=self._lowest - frame[0],
            conditioned=self.clean is None,
            label=self.facts.label,
        )

    def labelled(self, guarantee: Guarantee) -> Resident:
        """The same KV under another guarantee."""
        return self if guarantee == self.guarantee else replace(self, guarantee=guarantee)


def moved(positions: torch.Tensor, offset: Sequence[int]) -> torch.Tensor:
    """Positions ``[axes, tokens]`` all moved by one offset per axis."""
    return positions + torch.tensor(offset, dtype=positions.dtype)[:, None] if any(offset) else positions
