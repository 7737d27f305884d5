"""The smallest patch that answers: a deficit within a budget of bytes.

Three things make it small (`docs/patches.md` has what each buys): bytes go to the layers and channels where
they buy most, factors are stored in few bits, and what is kept is what the readers of a channel see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from einops import rearrange

from kamera.ops.allocate import allocate
from kamera.ops.factoring import energies, kept_energy, left_behind, share_kept, stacks
from kamera.ops.layout import Layout
from kamera.ops.lowrank import Deltas, Factor, Formed, LowRank, Patch
from kamera.ops.quantize import Bits, Codes, coded_bytes, encode
from kamera.ops.readers import Metric, Readers
from kamera.ops.spectrum import strongest

WIDTHS: tuple[Bits, ...] = (8, 4)

Key = tuple[int, str]  # layer, channel
_Columns = Callable[[int, int], Factor]  # of the n-th channel of a stack, the first k: a copy


class _Offer(NamedTuple):
    """All directions that may be kept of one channel, as they would be stored in one width."""

    first: Callable[[int], LowRank]  # the first k directions
    most: int
    gains: torch.Tensor  # what each group of directions buys
    cost: int  # bytes of one group
    behind: list[float]  # energy, as the readers see it, that the first k directions leave behind


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
    channels = [
        {c.name: delta[c.name] for c in spec.channels} for delta, spec in zip(deltas, layout, strict=True)
    ]
    choices: tuple[Bits | None, ...] = tuple(widths) or (None,)
    offers: dict[Bits | None, dict[Key, _Offer]] = {bits: {} for bits in choices}
    for keys, x in stacks(channels):
        metrics = [None if readers is None else readers.metric(i, name) for i, name in keys]
        cheapest = min(_cost(x.shape[1:], bits, dtype) for bits in choices)
        kept = 2 * (budget // max(1, cheapest))
        made = _offers(x, metrics, kept if rank is None else min(kept, rank), choices, dtype)
        for bits, some in zip(choices, made, strict=True):
            offers[bits].update(zip(keys, some, strict=True))
    spent = {bits: _spend(some, budget, _group(bits)) for bits, some in offers.items()}
    lost = {bits: sum(offers[bits][key].behind[k] for key, k in spent[bits].items()) for bits in choices}
    best = min(choices, key=lambda bits: lost[bits])
    patch = _patch(offers[best], spent[best], len(layout))
    if readers is not None:
        return Formed(patch, kept_energy(channels, patch))
    return Formed(patch, share_kept(sum(offer.behind[0] for offer in offers[best].values()), lost[best]))


def _offers(
    x: torch.Tensor,
    metrics: Sequence[Metric | None],
    kept: int,
    choices: Sequence[Bits | None],
    dtype: torch.dtype,
) -> Iterator[list[_Offer]]:
    """For every width, what a stack of channels ``x`` has to offer; factored once for all widths."""
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
        behind = left_behind(seen, lefts[0], shown, total).tolist()
        gains, cost = _pooled(found.values.square(), _group(bits)), _cost(x.shape[1:], bits, dtype)
        yield [
            _Offer(partial(_first, lefts[1], rights[1], n), most, gain, cost, rest)
            for n, (most, gain, rest) in enumerate(zip(found.counts, gains, behind, strict=True))
        ]


def _first(left: _Columns, right: _Columns, n: int, k: int) -> LowRank:
    return LowRank(left(n, k), right(n, k))


def _coded(side: torch.Tensor, bits: Bits | None, dtype: torch.dtype) -> tuple[torch.Tensor, _Columns]:
    """Factors ``[n, rows, m]`` as they would be stored: what they mean, and columns of them."""
    if bits is None:
        stored = side.to(dtype)
        return stored, lambda n, k: stored[n, :, :k].clone(memory_format=torch.contiguous_format)
    # columns have scales of their own, so those of all channels are coded side by side; of 4 bits a pair
    # shares its bytes, which no two channels may do
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


def _spend(offers: Mapping[Key, _Offer], budget: int, group: int) -> dict[Key, int]:
    """How many directions of each channel to keep, by what they buy per byte."""
    ranks = allocate(
        {key: offer.gains for key, offer in offers.items()},
        {key: offer.cost for key, offer in offers.items()},
        budget,
    )
    return {key: min(group * rank, offers[key].most) for key, rank in ranks.items()}


def _patch(offers: Mapping[Key, _Offer], ranks: Mapping[Key, int], layers: int) -> Patch:
    out: list[dict[str, LowRank]] = [{} for _ in range(layers)]
    for (i, name), rank in ranks.items():
        if rank:
            out[i][name] = offers[i, name].first(rank)
    return Patch(tuple(out))


def _group(bits: Bits | None) -> int:
    """Directions that are bought together: two columns of four bits share their bytes."""
    return 2 if bits == 4 else 1


def _cost(shape: Sequence[int], bits: Bits | None, dtype: torch.dtype) -> int:
    """Bytes of one group of directions of a channel ``[tokens, features]``."""
    if bits is None:
        return sum(shape) * dtype.itemsize
    return sum(coded_bytes(rows, _group(bits), bits) for rows in shape)


def _pooled(energies: torch.Tensor, group: int) -> torch.Tensor:
    """What each group of directions buys: the energy, as its readers see it, that it brings back."""
    spare = -energies.shape[1] % group
    return torch.nn.functional.pad(energies, (0, spare)).unflatten(1, (-1, group)).sum(2)
