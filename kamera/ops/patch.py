"""Conditioning patches: low-rank factors of what a chunk absorbs from its antecedents.

Δ = KV(B|A) − KV(B|∅) is taken in the *canonical frame*: phased channels of the conditioned copy are
first turned back to the canonical's positions. The patch is then rotated together with the chunk,
so one patch serves every position, and because the offset is the same for every token only the
small right factor turns: R(δ)(U Vᵀ) = U (R(δ) V)ᵀ (paper, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from einops import rearrange

from kamera.ops.kv import KV, Blocks, kv_map, regroup
from kamera.ops.layout import Channel, Layout, check_kv, relocate_kv
from kamera.ops.lowrank import Deltas, Formed, LowRank, LowRanks, Patch, floats
from kamera.ops.rope import relocate
from kamera.ops.svd import residuals, share_kept, stacks, strongest_directions


def deficit(conditioned: KV, canonical: KV, layout: Layout, offset: Sequence[int]) -> Deltas:
    """Δ in the canonical frame: per channel ``[layers, tokens, features]``, float32 or wider.

    ``offset`` (one entry per axis) is the position of the conditioned copy minus that of the
    canonical. Neither input is modified.
    """
    check_kv(canonical, layout)
    # Turn back in float32: rounding the turned copy to bf16 first would put noise into the deficit.
    wide = kv_map(regroup(conditioned, canonical.groups), _wide)
    back = relocate_kv(wide, layout, [-o for o in offset])
    return Blocks(
        [
            {name: _flatten(x) - _flatten(_wide(own[name])) for name, x in moved.items()}
            for moved, own in zip(back.parts, canonical.parts, strict=True)
        ],
        canonical.groups,
    )


def form_patch(
    conditioned: KV,
    canonical: KV,
    layout: Layout,
    offset: Sequence[int],
    rank: int | None = None,
    dtype: torch.dtype | None = None,
) -> Formed:
    """The rank-``rank`` patch that takes ``canonical`` to ``conditioned`` (all ranks for None).

    ``dtype`` is that of the stored factors; default: that of the canonical.
    """
    return patch_of(deficit(conditioned, canonical, layout, offset), rank, dtype or _dtype(canonical))


def patch_of(deltas: Deltas, rank: int | None, dtype: torch.dtype) -> Formed:
    """Factor deficits (from `deficit`) into a patch of one rank for all channels."""
    found: list[dict[str, list[LowRanks]]] = [{} for _ in deltas.groups]
    total = lost = 0.0
    for group, name, _, x in stacks(deltas):
        directions = strongest_directions(x, rank)
        left, right = directions.left.to(dtype), directions.right.to(dtype)
        residual = residuals(x, left, right)
        total += float(residual[:, 0].sum())
        lost += float(residual[:, -1].sum())
        counts = torch.tensor(directions.counts, device=x.device)
        kept = torch.arange(left.shape[2], device=x.device) < counts[:, None]
        left, right = (side.transpose(0, 1)[:, kept].contiguous() for side in (left, right))
        found[group].setdefault(name, []).append(LowRanks(left, right, tuple(directions.counts)))
    parts = [{n: low for n, some in block.items() if (low := _join(some)).rank} for block in found]
    return Formed(Patch(Blocks(parts, deltas.groups)), share_kept(total, lost))


def mean_deficit(deficits: Iterable[Deltas]) -> Deltas:
    """Orbit mean: the average of Δ over orderings of an antecedent set (paper, section 5)."""
    total: Deltas | None = None
    count = 0
    for deltas in deficits:
        count += 1
        if total is None:
            total = kv_map(deltas, torch.clone)
            continue
        for mine, theirs in zip(total.parts, deltas.parts, strict=True):
            for name, delta in theirs.items():
                mine[name].add_(delta)
    if total is None:
        raise ValueError("the orbit mean needs the deficit of at least one ordering")
    return Blocks([{name: x / count for name, x in block.items()} for block in total.parts], total.groups)


def apply_patch(canonical: KV, patch: Patch | None, layout: Layout, offset: Sequence[int]) -> KV:
    """KV of a chunk relocated by ``offset`` from its canonical: R(δ)·canonical + U (R(δ) V)ᵀ (eq. 1).

    Without a patch this is blind reuse. Sums are done in float32 and cast last. Free channels without a
    correction are shared with the input, so do not write to the result in place. This is the slow reference
    of `kamera.ops.kernels.serve`, which writes into an existing buffer.
    """
    check_kv(canonical, layout)
    if patch is None:
        return relocate_kv(canonical, layout, offset)
    if len(patch.blocks) != len(layout):
        raise ValueError(f"patch of {len(patch.blocks)} layers, layout of {len(layout)}")
    out = []
    held = patch.regroup(canonical.groups).blocks
    for block, factors, layers in zip(canonical.parts, held.parts, held.groups, strict=True):
        unknown = factors.keys() - block.keys()
        if unknown:
            raise ValueError(f"patch names channels {sorted(unknown)}, which the layout lacks")
        channels = layout[layers[0]].channels
        out.append({c.name: apply_channel(block[c.name], factors.get(c.name), c, offset) for c in channels})
    return Blocks(out, held.groups)


def exact_kv(canonical: KV, patch: Patch | None, layout: Layout, offset: Sequence[int]) -> KV:
    """`apply_patch` in float64, rounded once to the dtype of each channel."""
    wide = apply_patch(kv_map(canonical, torch.Tensor.double), patch, layout, offset)
    pairs = zip(wide.parts, canonical.parts, strict=True)
    return Blocks([{n: t.to(own[n].dtype) for n, t in block.items()} for block, own in pairs], wide.groups)


def apply_channel(
    x: torch.Tensor, factors: LowRanks | None, channel: Channel, offset: Sequence[int]
) -> torch.Tensor:
    """`apply_patch` of one channel ``[layers, heads, tokens, dim]``."""
    wide = x if factors is None else _wide(x)  # one rounding, after the sum
    if channel.rope is not None:
        wide = relocate(wide, channel.rope, offset, rotary_start=channel.rotary_start)
    return wide if factors is None else _add(wide, factors, channel, offset).to(x.dtype)


_Factors = TypeVar("_Factors", LowRank, LowRanks)


def rotate_factors(factors: _Factors, channel: Channel, offset: Sequence[int]) -> _Factors:
    """R(δ) on the right factor of a phased channel; a free channel's factors are returned as is."""
    if channel.rope is None:
        return factors
    right = _wide(floats(factors.right))
    wide = rearrange(right, "(heads dim) rank -> rank heads dim", heads=channel.heads)
    turned = relocate(wide, channel.rope, offset, rotary_start=channel.rotary_start)
    turned = rearrange(turned, "rank heads dim -> rank (heads dim)").T
    if isinstance(factors, LowRanks):
        return LowRanks(
            _without_pairs(factors, floats(factors.left)), _without_pairs(factors, turned), factors.ranks
        )
    return replace(factors, right=turned)


def _without_pairs(factors: LowRanks, side: torch.Tensor) -> torch.Tensor:
    """The columns ``[rows, m]`` of all layers without the columns of zeros that fill pairs."""
    pairs = zip(factors.starts, factors.ranks, strict=False)
    return torch.cat([side[:, start : start + rank] for start, rank in pairs], dim=1)


def _join(some: Sequence[LowRanks]) -> LowRanks:
    """Factors of layers that follow each other, in floats."""
    if len(some) == 1:
        return some[0]
    left = torch.cat([floats(f.left) for f in some], dim=1)
    right = torch.cat([floats(f.right) for f in some], dim=1)
    return LowRanks(left, right, tuple(rank for f in some for rank in f.ranks))


def _add(x: torch.Tensor, factors: LowRanks, channel: Channel, offset: Sequence[int]) -> torch.Tensor:
    if factors.left.shape[0] != x.shape[2] or factors.right.shape[0] != channel.features:
        raise ValueError(
            f"patch [{factors.left.shape[0]} tokens, {factors.right.shape[0]} features] does not fit "
            f"channel {channel.name} [{x.shape[2]} tokens, {channel.features} features]"
        )
    turned = rotate_factors(factors, channel, offset)
    corrected = [
        low.dense().to(x.device) if low.rank else None
        for low in map(turned.__getitem__, range(len(turned.ranks)))
    ]
    out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    for layer, correction in zip(out, corrected, strict=True):
        if correction is not None:
            layer += rearrange(correction, "tokens (heads dim) -> heads tokens dim", heads=channel.heads)
    return out.to(x.dtype)


def _flatten(x: torch.Tensor) -> torch.Tensor:
    return rearrange(x, "layers heads tokens dim -> layers tokens (heads dim)")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _dtype(kv: KV) -> torch.dtype:
    for block in kv.parts:
        for tensor in block.values():
            return tensor.dtype
    return torch.float32
