"""The largest size of a patch, and the best patch of that size.

Within a budget of bytes two measures make it small (`docs/how-it-works.md` has the gain of each): bytes are
allotted to the layers and channels of largest gain, and factors are stored in few bits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from einops import rearrange

from kamera.errors import quote
from kamera.ops.kv import KV, Blocks, Groups, kv_bytes
from kamera.ops.layout import Layout, check_layers
from kamera.ops.lowrank import Deltas, Factor, Formed, LowRank, Patch
from kamera.ops.patch import patch_of
from kamera.ops.quantize import Bits, Codes, coded_bytes, quantize
from kamera.ops.svd import energies, kept_energy, residuals, share_kept, stacks, strongest_directions

Item = TypeVar("Item")


def allocate(gains: Mapping[Item, torch.Tensor], costs: Mapping[Item, int], budget: int) -> dict[Item, int]:
    """Rank of each channel within ``budget`` bytes.

    ``gains[key]`` are the gains of a channel's directions, strongest first, ``costs[key]`` the bytes of
    each of them. Greedy by gain per byte, which is optimal up to the last direction; one rank for all is
    taken if its total gain is larger (channels of very different cost, a budget of a few directions).
    Directions without gain are left out. Raises ValueError for a negative budget, a cost below one byte,
    and gains that grow.
    """
    if budget < 0:
        raise ValueError(f"a budget of {budget} bytes is negative")
    for key, gain in gains.items():
        if costs[key] < 1:
            raise ValueError(f"a direction of {key} costs {costs[key]} bytes: must be at least 1")
        if bool((gain[1:] > gain[:-1]).any()):
            raise ValueError(f"the gains of {key} must not grow: give them strongest first")
    channels = _Channels.of(gains, costs)
    choices = (_allocate_greedily(channels, budget), _allocate_evenly(channels, budget))
    best = max(choices, key=channels.gain)
    return dict(zip(gains, best.tolist(), strict=True))


class _Channels(NamedTuple):
    """Gains of n channels ``[n, directions]``, padded with zeros; ``useful`` [n] counts those above zero."""

    gains: np.ndarray
    useful: np.ndarray
    costs: np.ndarray

    @classmethod
    def of(cls, gains: Mapping[Item, torch.Tensor], costs: Mapping[Item, int]) -> _Channels:
        table = np.zeros((len(gains), max(map(len, gains.values()), default=0)))
        for row, gain in zip(table, gains.values(), strict=True):
            row[: len(gain)] = gain.tolist()
        return cls(table, (table > 0).sum(1), np.array(list(map(costs.__getitem__, gains)), dtype=np.int64))

    def gain(self, ranks: np.ndarray) -> float:
        """Total gain of ``ranks`` [n]."""
        return float(self.gains[np.arange(self.gains.shape[1]) < ranks[:, None]].sum())


def _allocate_greedily(channels: _Channels, budget: int) -> np.ndarray:
    ranks = np.zeros_like(channels.costs)
    per_byte = channels.gains / channels.costs[:, None]
    # a stable sort keeps the directions of a channel in order
    for place in np.argsort(-per_byte, axis=None, kind="stable")[: int(channels.useful.sum())].tolist():
        channel = place // channels.gains.shape[1]
        # all directions of a channel cost the same: one that does not fit is followed by none that does
        if channels.costs[channel] <= budget:
            budget -= channels.costs[channel]
            ranks[channel] += 1
    return ranks


def _allocate_evenly(channels: _Channels, budget: int) -> np.ndarray:
    steps = np.arange(1, 1 + channels.gains.shape[1])
    prices = np.where(channels.useful[:, None] >= steps, channels.costs[:, None], 0).sum(0)
    affordable = int((prices.cumsum() <= budget).sum())
    return np.minimum(channels.useful, affordable)


WIDTHS: tuple[Bits, ...] = (8, 4)

Key = tuple[int, str]  # layer, channel


class Columns(NamedTuple):
    """Factors of a stack of channels as they are stored: floats or codes ``[n, rows, …]``, and the scales
    ``[n, m]`` of codes."""

    stored: torch.Tensor
    scales: torch.Tensor | None

    def first(self, channel: int, count: int) -> Factor:
        """The first columns of a channel: a copy, as a view would keep the whole stack alive."""
        if self.scales is None:
            return self.stored[channel, :, :count].clone(memory_format=torch.contiguous_format)
        some = Codes(self.stored[channel], self.scales[channel]).truncate(count)
        return Codes(some.codes.clone(), some.scales.clone())


class Candidates(NamedTuple):
    """All directions of one channel that may be kept, coded in one width."""

    sides: tuple[Columns, Columns]  # left and right, of a stack of channels
    channel: int  # its number in the stack
    most: int
    gains: torch.Tensor  # energy of each group of directions
    cost: int  # bytes of one group
    residual: list[float]  # energy without the first k directions

    def first(self, count: int) -> LowRank:
        """The strongest directions."""
        left, right = (side.first(self.channel, count) for side in self.sides)
        return LowRank(left, right)


def compress(
    deltas: Deltas,
    layout: Layout,
    budget: int,
    *,
    widths: Sequence[Bits] = WIDTHS,
    dtype: torch.dtype = torch.float32,
    rank: int | None = None,
) -> Formed:
    """The best patch of at most ``budget`` bytes for deficits from `deficit`.

    A direction counts by its energy. Factors are coded in the one of ``widths`` bits with the smallest
    residual (at small budgets twice the directions at half the bits are better); an empty ``widths`` stores
    floats of ``dtype``. ``rank`` bounds the directions of a channel. A budget below the cost of any direction
    gives the empty patch. Raises ValueError for a negative budget, and for deficits that do not fit the
    layout.
    """
    check_fit(deltas, layout, budget)
    choices: tuple[Bits | None, ...] = tuple(widths) or (None,)
    candidates: dict[Bits | None, dict[Key, Candidates]] = {bits: {} for bits in choices}
    for _, name, layers, x in stacks(deltas):
        kept = most_paid(x.shape[1:], budget, choices, dtype)
        made = _candidates(x, kept if rank is None else min(kept, rank), choices, dtype)
        for bits, some in zip(choices, made, strict=True):
            candidates[bits].update(zip([(i, name) for i in layers], some, strict=True))
    ranks = {bits: allot(some, budget, group_size(bits)) for bits, some in candidates.items()}
    lost = {
        bits: sum(candidates[bits][key].residual[k] for key, k in ranks[bits].items()) for bits in choices
    }
    best = min(choices, key=lost.__getitem__)
    whole = sum(c.residual[0] for c in candidates[best].values())
    return Formed(patch_of_ranks(candidates[best], ranks[best], deltas.groups), share_kept(whole, lost[best]))


def check_fit(deltas: Deltas, layout: Layout, budget: int) -> None:
    """Raise ValueError as `compress`."""
    if budget < 0:
        raise ValueError(f"a budget of {budget} bytes is negative")
    if len(deltas) != len(layout):
        raise ValueError(f"deficits of {len(deltas)} layers, layout of {len(layout)}")
    check_layers(deltas.groups, layout)
    for block, layers in zip(deltas.parts, deltas.groups, strict=True):
        if missing := [c.name for c in layout[layers[0]].channels if c.name not in block]:
            raise ValueError(f"layer {layers[0]} has no deficit of channel {missing[0]}")


def most_paid(shape: Sequence[int], budget: int, choices: Sequence[Bits | None], dtype: torch.dtype) -> int:
    """Directions of a channel ``[tokens, features]`` that a budget could pay, at most."""
    return 2 * (budget // max(1, min(cost_of(shape, bits, dtype) for bits in choices)))


def _candidates(
    x: torch.Tensor, kept: int, choices: Sequence[Bits | None], dtype: torch.dtype
) -> Iterator[list[Candidates]]:
    """Candidates of a stack of channels ``x`` in every width; factored once for all widths."""
    best, total = strongest_directions(x, kept), energies(x)
    for bits in choices:
        lefts, rights = (code_columns(side.to(x.dtype), bits, dtype) for side in (best.left, best.right))
        residual = residuals(x, lefts[0], rights[0], total).tolist()
        gains, cost = pool_gains(best.values.square(), group_size(bits)), cost_of(x.shape[1:], bits, dtype)
        yield [
            Candidates((lefts[1], rights[1]), n, most, gain, cost, rest)
            for n, (most, gain, rest) in enumerate(zip(best.counts, gains, residual, strict=True))
        ]


def code_columns(side: torch.Tensor, bits: Bits | None, dtype: torch.dtype) -> tuple[torch.Tensor, Columns]:
    """Factors ``[n, rows, m]`` coded: their decoded values, and their columns to store."""
    if bits is None:
        stored = side.to(dtype)
        return stored, Columns(stored, None)
    # each column has its own scale, so all channels are coded side by side; two 4-bit columns share their
    # bytes, so every channel is padded to an even number of them
    count, _, wanted = side.shape
    side = torch.nn.functional.pad(side, (0, wanted % 2))
    whole = quantize(rearrange(side, "channels rows rank -> rows (channels rank)"), bits)
    held = rearrange(whole.codes, "rows (channels held) -> channels rows held", channels=count)
    dense = rearrange(whole.dense(), "rows (channels rank) -> channels rows rank", channels=count)
    return dense[:, :, :wanted], Columns(held, whole.scales.unflatten(0, (count, -1)))


def allot(candidates: Mapping[Key, Candidates], budget: int, group: int) -> dict[Key, int]:
    """Rank of each channel, by gain per byte."""
    groups = allocate(
        {key: c.gains for key, c in candidates.items()},
        {key: c.cost for key, c in candidates.items()},
        budget,
    )
    return {key: min(group * count, candidates[key].most) for key, count in groups.items()}


def patch_of_ranks(candidates: Mapping[Key, Candidates], ranks: Mapping[Key, int], groups: Groups) -> Patch:
    out: list[dict[str, LowRank]] = [{} for group in groups for _ in group]
    for (i, name), rank in ranks.items():
        if rank:
            out[i][name] = candidates[i, name].first(rank)
    return Patch.of(out, groups)


def group_size(bits: Bits | None) -> int:
    """Directions that are kept together: two columns of four bits share their bytes."""
    return 2 if bits == 4 else 1


def cost_of(shape: Sequence[int], bits: Bits | None, dtype: torch.dtype) -> int:
    """Bytes of one group of directions of a channel ``[tokens, features]``."""
    if bits is None:
        return sum(shape) * dtype.itemsize
    return sum(coded_bytes(rows, group_size(bits), bits) for rows in shape)


def pool_gains(energies: torch.Tensor, group: int) -> torch.Tensor:
    """Gain of each group of directions: its energy."""
    spare = -energies.shape[1] % group
    return torch.nn.functional.pad(energies, (0, spare)).unflatten(1, (-1, group)).sum(2)


SMALL = 128 * 1024
"""Bytes to which any patch may grow: the chunk's embeddings alone take more."""


class Sized(NamedTuple):
    """A patch, and the limits that applied when it was formed."""

    formed: Formed
    budget: PatchBudget


@dataclass(frozen=True)
class PatchBudget:
    """At most ``rank`` directions per layer and channel, and at most ``share`` of the chunk's KV bytes.

    ``share`` None means no limit on bytes. The share never cuts a patch below `SMALL` bytes. ``layers`` are
    the layers to correct (ascending; None: all). Raises ValueError for a rank below 1, a share outside
    (0, 1], and layers that are empty or not a tuple from `layers_of`.
    """

    rank: int
    share: float | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank {self.rank} must be at least 1")
        if self.share is not None and not 0.0 < self.share <= 1.0:
            raise ValueError(f"patch_bytes {self.share} must be a share of the KV bytes above 0.0, up to 1.0")
        if self.layers != layers_of(self.layers):
            raise ValueError(f"layers {self.layers} are not a tuple in ascending order")

    def form(self, deltas: Deltas, layout: Layout, canonical: KV) -> Sized:
        """The best patch within the budget for deficits from `deficit`.

        Plain factors in the canonical's dtype, if they fit; otherwise `compress` allots the bytes. Raises
        ValueError for layers that the layout lacks.
        """
        self.check(len(layout))
        if self.layers is None:
            return self._form(deltas, layout, canonical)
        some = _select_layers(deltas, set(self.layers))
        spent = tuple(s if i in self.layers else replace(s, channels=()) for i, s in enumerate(layout))
        (patch, _), budget = self._form(some, spent, canonical)
        patch = patch.regroup(deltas.groups)
        return Sized(Formed(patch, kept_energy(deltas, patch)), budget)  # layers left out count as lost

    def check(self, depth: int) -> None:
        """Raise ValueError for layers beyond a model of ``depth`` layers."""
        if self.layers is not None and self.layers[-1] >= depth:
            raise ValueError(
                f"layer {self.layers[-1]} of a model of {depth} layers: give layers from 0 to {depth - 1}"
            )

    def is_met_by(self, other: PatchBudget, tokens: int) -> bool:
        """True if a patch of a ``tokens``-token chunk formed under ``other`` satisfies this budget."""
        if min(other.rank, tokens) < min(self.rank, tokens):
            return False
        if other.layers is not None and (self.layers is None or not set(self.layers) <= set(other.layers)):
            return False
        return other.share is None or (self.share is not None and other.share >= self.share)

    def union(self, other: PatchBudget) -> PatchBudget:
        """The smallest budget that satisfies both."""
        share = None if self.share is None or other.share is None else max(self.share, other.share)
        both = None
        if self.layers is not None and other.layers is not None:
            both = layers_of((*self.layers, *other.layers))
        return PatchBudget(max(self.rank, other.rank), share, both)

    def double(self, kv: KV) -> PatchBudget:
        """Twice the rank, and twice the bytes that a patch of this canonical may have; the same layers."""
        share = None if self.share is None else min(1.0, 2 * max(self.share, SMALL / kv_bytes(kv)))
        return PatchBudget(2 * self.rank, share, self.layers)

    def to_info(self) -> dict[str, Any]:
        """The budget as written to a record's ``info``."""
        layers = {} if self.layers is None else {"asked_layers": list(self.layers)}
        return {"asked_rank": self.rank, "asked_share": self.share, **layers}

    @classmethod
    def from_info(cls, info: Mapping[str, Any], rank: int) -> PatchBudget:
        """The budget of a stored patch; ``rank`` is the patch's own, for records without a budget."""
        layers = layers_of(info.get("asked_layers"))
        return cls(max(1, int(info.get("asked_rank", rank))), info.get("asked_share"), layers)

    def _form(self, deltas: Deltas, layout: Layout, canonical: KV) -> Sized:
        dtype = next(t.dtype for block in canonical.parts for t in block.values())
        if self.share is None:
            return Sized(patch_of(deltas, self.rank, dtype), self)
        plain = sum(
            delta.shape[0] * min(self.rank, *delta.shape[1:]) * sum(delta.shape[1:]) * dtype.itemsize
            for block in deltas.parts
            for delta in block.values()
        )
        allowed = max(int(self.share * kv_bytes(canonical)), min(SMALL, plain))
        if plain <= allowed:
            return Sized(patch_of(deltas, self.rank, dtype), PatchBudget(self.rank, None, self.layers))
        return Sized(compress(deltas, layout, allowed, rank=self.rank), self)


def _select_layers(deltas: Deltas, wanted: set[int]) -> Deltas:
    """The deficits of some layers; the others have no channels."""
    parts: list[Mapping[str, torch.Tensor]] = []
    groups: list[tuple[int, ...]] = []
    for block, layers in zip(deltas.parts, deltas.groups, strict=True):
        for inside in (True, False):
            rows = [row for row, layer in enumerate(layers) if (layer in wanted) == inside]
            if rows:
                parts.append({name: x[rows] for name, x in block.items()} if inside else {})
                groups.append(tuple(layers[row] for row in rows))
    return Blocks(parts, tuple(groups))


def layers_of(given: Sequence[int] | str | None) -> tuple[int, ...] | None:
    """Layer numbers in ascending order, from a list or from ``"a:b"`` (a to b - 1); None for all.

    Raises ValueError for other values, negative numbers and an empty list.
    """
    if given is None:
        return None
    numbers: Sequence[int] = ()
    if isinstance(given, str):
        span = re.fullmatch(r"(\d{1,6}):(\d{1,6})", given)
        numbers = range(int(span.group(1)), int(span.group(2))) if span else numbers
    else:
        numbers = given
    if not numbers or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(
            f'layers {quote(given)}: give numbers from 0 on, as a list or as "a:b" with a below b'
        )
    return tuple(sorted(set(numbers)))
