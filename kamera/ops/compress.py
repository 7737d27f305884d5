"""The best patch of a deficit within a budget of bytes.

Three measures make it small (`docs/patches.md` has the gain of each): bytes are allotted to the layers and
channels of largest gain, factors are stored in few bits, and directions are weighted by a channel's readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange

from kamera.ops.allocate import allocate
from kamera.ops.blocks import Groups
from kamera.ops.factoring import energies, kept_energy, residuals, share_kept, stacks
from kamera.ops.layout import Layout, check_layers
from kamera.ops.lowrank import Deltas, Factor, Formed, LowRank, Patch
from kamera.ops.quantize import Bits, Codes, coded_bytes, encode
from kamera.ops.readers import Metric, Readers
from kamera.ops.spectrum import strongest

WIDTHS: tuple[Bits, ...] = (8, 4)

Key = tuple[int, str]  # layer, channel
_Columns = Callable[[int, int], Factor]  # of the n-th channel of a stack, the first k: a copy


class _Candidates(NamedTuple):
    """All directions of one channel that may be kept, coded in one width."""

    first: Callable[[int], LowRank]  # the first k directions
    most: int
    gains: torch.Tensor  # energy of each group of directions
    cost: int  # bytes of one group
    residual: list[float]  # weighted energy without the first k directions


def compress(
    deltas: Deltas,
    layout: Layout,
    budget: int,
    *,
    readers: Readers | None = None,
    widths: Sequence[Bits] = WIDTHS,
    dtype: torch.dtype = torch.float32,
    rank: int | None = None,
) -> Formed:
    """The best patch of at most ``budget`` bytes for deficits from `deficit`.

    ``readers`` weight the directions; without them a direction counts by its energy. Factors are coded in
    the one of ``widths`` bits with the smallest residual (at small budgets twice the directions at half the
    bits are better); an empty ``widths`` stores floats of ``dtype``. ``rank`` bounds the directions of a
    channel. A budget below the cost of any direction gives the empty patch. Raises ValueError for a
    negative budget, and for deficits or readers that do not fit the layout.
    """
    if budget < 0:
        raise ValueError(f"a budget of {budget} bytes is negative")
    if len(deltas) != len(layout):
        raise ValueError(f"deficits of {len(deltas)} layers, layout of {len(layout)}")
    if readers is not None:
        readers.check(layout)
    check_layers(deltas.groups, layout)
    for block, layers in zip(deltas.parts, deltas.groups, strict=True):
        if missing := [c.name for c in layout[layers[0]].channels if c.name not in block]:
            raise ValueError(f"layer {layers[0]} has no deficit of channel {missing[0]}")
    choices: tuple[Bits | None, ...] = tuple(widths) or (None,)
    candidates: dict[Bits | None, dict[Key, _Candidates]] = {bits: {} for bits in choices}
    for _, name, layers, x in stacks(deltas):
        keys = [(i, name) for i in layers]
        metrics = [None if readers is None else readers.metric(i, name) for i, name in keys]
        cheapest = min(_cost(x.shape[1:], bits, dtype) for bits in choices)
        kept = 2 * (budget // max(1, cheapest))
        made = _candidates(x, metrics, kept if rank is None else min(kept, rank), choices, dtype)
        for bits, some in zip(choices, made, strict=True):
            candidates[bits].update(zip(keys, some, strict=True))
    ranks = {bits: _allot(some, budget, _group(bits)) for bits, some in candidates.items()}
    lost = {
        bits: sum(candidates[bits][key].residual[k] for key, k in ranks[bits].items()) for bits in choices
    }
    best = min(choices, key=lambda bits: lost[bits])
    patch = _patch(candidates[best], ranks[best], deltas.groups)
    if readers is not None:
        return Formed(patch, kept_energy(deltas, patch))
    return Formed(patch, share_kept(sum(c.residual[0] for c in candidates[best].values()), lost[best]))


def _candidates(
    x: torch.Tensor,
    metrics: Sequence[Metric | None],
    kept: int,
    choices: Sequence[Bits | None],
    dtype: torch.dtype,
) -> Iterator[list[_Candidates]]:
    """Candidates of a stack of channels ``x`` in every width; factored once for all widths."""
    seen = x
    if any(metric is not None for metric in metrics):
        pairs = zip(metrics, x, strict=True)
        seen = torch.stack([d.to(torch.float64) if m is None else m.apply(d) for m, d in pairs])
    found = strongest(seen, kept)
    right = found.right
    if seen is not x:
        pairs = zip(metrics, right, strict=True)
        right = torch.stack([r if m is None else m.undo(r.mT).mT for m, r in pairs])
    total = energies(seen)
    for bits in choices:
        lefts, rights = (_coded(side.to(x.dtype), bits, dtype) for side in (found.left, right))
        shown = rights[0]
        if seen is not x:
            pairs = zip(metrics, shown, strict=True)
            shown = torch.stack([r.to(torch.float64) if m is None else m.apply(r.mT).mT for m, r in pairs])
        residual = residuals(seen, lefts[0], shown, total).tolist()
        gains, cost = _pooled(found.values.square(), _group(bits)), _cost(x.shape[1:], bits, dtype)
        yield [
            _Candidates(partial(_first, lefts[1], rights[1], n), most, gain, cost, rest)
            for n, (most, gain, rest) in enumerate(zip(found.counts, gains, residual, strict=True))
        ]


def _first(left: _Columns, right: _Columns, n: int, k: int) -> LowRank:
    return LowRank(left(n, k), right(n, k))


def _coded(side: torch.Tensor, bits: Bits | None, dtype: torch.dtype) -> tuple[torch.Tensor, _Columns]:
    """Factors ``[n, rows, m]`` coded: their decoded values, and their columns to store."""
    if bits is None:
        stored = side.to(dtype)
        return stored, lambda n, k: stored[n, :, :k].clone(memory_format=torch.contiguous_format)
    # each column has its own scale, so all channels are coded side by side; two 4-bit columns share their
    # bytes, so every channel is padded to an even number of them
    count, _, wanted = side.shape
    side = torch.nn.functional.pad(side, (0, wanted % 2))
    m = side.shape[2]
    whole = encode(rearrange(side, "channels rows rank -> rows (channels rank)"), bits)
    held = rearrange(whole.codes, "rows (channels held) -> rows channels held", channels=count)

    def columns(n: int, k: int) -> Factor:
        some = Codes(held[:, n], whole.scales[n * m : (n + 1) * m]).truncate(k)
        return Codes(some.codes.clone(), some.scales.clone())  # a view would keep the whole stack alive

    dense = rearrange(whole.dense(), "rows (channels rank) -> channels rows rank", channels=count)
    return dense[:, :, :wanted], columns


def _allot(candidates: Mapping[Key, _Candidates], budget: int, group: int) -> dict[Key, int]:
    """Rank of each channel, by gain per byte."""
    groups = allocate(
        {key: c.gains for key, c in candidates.items()},
        {key: c.cost for key, c in candidates.items()},
        budget,
    )
    return {key: min(group * count, candidates[key].most) for key, count in groups.items()}


def _patch(candidates: Mapping[Key, _Candidates], ranks: Mapping[Key, int], groups: Groups) -> Patch:
    out: list[dict[str, LowRank]] = [{} for group in groups for _ in group]
    for (i, name), rank in ranks.items():
        if rank:
            out[i][name] = candidates[i, name].first(rank)
    return Patch.of(out, groups)


def _group(bits: Bits | None) -> int:
    """Directions that are kept together: two columns of four bits share their bytes."""
    return 2 if bits == 4 else 1


def _cost(shape: Sequence[int], bits: Bits | None, dtype: torch.dtype) -> int:
    """Bytes of one group of directions of a channel ``[tokens, features]``."""
    if bits is None:
        return sum(shape) * dtype.itemsize
    return sum(coded_bytes(rows, _group(bits), bits) for rows in shape)


def _pooled(energies: torch.Tensor, group: int) -> torch.Tensor:
    """Gain of each group of directions: its energy, weighted by the readers."""
    spare = -energies.shape[1] % group
    return torch.nn.functional.pad(energies, (0, spare)).unflatten(1, (-1, group)).sum(2)
