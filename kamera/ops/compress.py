"""The best patch of a deficit within a budget of bytes.

Two measures make it small (`docs/how-it-works.md` has the gain of each): bytes are allotted to the layers and
channels of largest gain, and factors are stored in few bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from einops import rearrange

from kamera.ops.allocate import allocate
from kamera.ops.factoring import energies, residuals, share_kept, stacks
from kamera.ops.kv import Groups
from kamera.ops.layout import Layout, check_layers
from kamera.ops.lowrank import Deltas, Factor, Formed, LowRank, Patch
from kamera.ops.quantize import Bits, Codes, coded_bytes, quantize
from kamera.ops.spectrum import strongest_directions

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
