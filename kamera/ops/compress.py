"""The smallest patch that answers: a deficit within a budget of bytes.

Three things make it small (`docs/patches.md` has what each buys): bytes go to the layers and channels where
they buy most, factors are stored in few bits, and what is kept is what the readers of a channel see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kamera.ops.allocate import allocate
from kamera.ops.layout import Layout
from kamera.ops.lowrank import Deltas, Formed, LowRank, Patch, factor, floats, kept_energy
from kamera.ops.quantize import Bits, coded_bytes
from kamera.ops.readers import Metric, Readers

WIDTHS: tuple[Bits, ...] = (8, 4)


class _Whole(NamedTuple):
    """One channel before truncation: its deficit, the weights it is judged by, all that may be kept."""

    delta: torch.Tensor
    metric: Metric | None
    low: LowRank


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
    """The best patch of at most ``budget`` bytes for deficits as `deficit` gives them.

    ``readers`` say what a direction is worth; without them it is worth its energy. Factors are coded in
    the one of ``widths`` bits that leaves the least behind (twice the directions at half the bits pay at
    small budgets); an empty ``widths`` stores floats of ``dtype``. ``rank`` bounds the directions of a
    channel. A budget below the cost of any direction gives the empty patch. Raises ValueError for a
    negative budget, and for deficits or readers that do not fit the layout.
    """
    if budget < 0:
        raise ValueError(f"a budget of {budget} bytes is negative")
    if len(deltas) != len(layout):
        raise ValueError(f"deficits of {len(deltas)} layers, layout of {len(layout)}")
    if readers is not None:
        readers.check(layout)
    whole: dict[tuple[int, str], _Whole] = {}
    for i, spec in enumerate(layout):
        for c in spec.channels:
            delta = deltas[i][c.name]
            metric = None if readers is None else readers.metric(i, c.name)
            most = budget // min((_cost(delta, bits, dtype) for bits in widths or (None,)), default=1)
            kept = 2 * most if rank is None else min(2 * most, rank)
            whole[i, c.name] = _Whole(delta, metric, factor(delta, kept, metric))
    choices = [_spend(whole, len(layout), budget, bits, dtype) for bits in widths or (None,)]
    patch = min(choices, key=lambda choice: _left_behind(whole, choice))
    return Formed(patch, kept_energy(deltas, patch))


def _spend(
    whole: dict[tuple[int, str], _Whole], layers: int, budget: int, bits: Bits | None, dtype: torch.dtype
) -> Patch:
    """The patch of one width: a rank for every channel, by what its directions buy per byte."""
    group = _group(bits)
    ranks = allocate(
        {key: _pooled(channel.low, group) for key, channel in whole.items()},
        {key: _cost(channel.delta, bits, dtype) for key, channel in whole.items()},
        budget,
    )
    out: list[dict[str, LowRank]] = [{} for _ in range(layers)]
    for (i, name), rank in ranks.items():
        kept = whole[i, name].low.truncate(group * rank)
        if kept.rank:
            out[i][name] = kept.cast(dtype) if bits is None else kept.quantize(bits)
    return Patch(tuple(out))


def _group(bits: Bits | None) -> int:
    """Directions that are bought together: two columns of four bits share their bytes."""
    return 2 if bits == 4 else 1


def _cost(delta: torch.Tensor, bits: Bits | None, dtype: torch.dtype) -> int:
    """Bytes of one group of directions."""
    if bits is None:
        return sum(delta.shape) * dtype.itemsize
    return sum(coded_bytes(rows, _group(bits), bits) for rows in delta.shape)


def _pooled(low: LowRank, group: int) -> torch.Tensor:
    """What each group of directions buys: the energy, as its readers see it, that it brings back."""
    # the left factor carries the root of each singular value, under a metric too
    energies = floats(low.left).to(torch.float64).square().sum(0).square()
    spare = -energies.shape[0] % group
    return torch.nn.functional.pad(energies, (0, spare)).reshape(-1, group).sum(1)


def _left_behind(whole: dict[tuple[int, str], _Whole], patch: Patch) -> float:
    """Energy of the deficit, as its readers see it, that the patch does not bring back."""
    lost = 0.0
    for (i, name), channel in whole.items():
        error = channel.delta.to(torch.float64)
        if name in patch.layers[i]:
            error = error - patch.layers[i][name].dense().to(error)
        seen = error if channel.metric is None else channel.metric.apply(error)
        lost += float(seen.square().sum())
    return lost
