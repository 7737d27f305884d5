"""Conditioning patches: low-rank factors of what a chunk absorbs from its antecedents.

Δ = KV(B|A) − KV(B|∅) is taken in the *canonical frame*: phased channels of the conditioned copy are
first turned back to the canonical's positions. The patch is then rotated together with the chunk,
so one patch serves every position, and because the offset is the same for every token only the
small right factor turns: R(δ)(U Vᵀ) = U (R(δ) V)ᵀ (DESIGN, section 2; paper, section 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from einops import rearrange

from kamera.ops.factoring import residuals, share_kept, stacks
from kamera.ops.kv import KV, LayerKV
from kamera.ops.layout import Channel, Layout, check_kv, relocate_kv
from kamera.ops.lowrank import Deltas, Formed, LowRank, Patch, floats
from kamera.ops.rope import relocate
from kamera.ops.spectrum import strongest


def deficit(
    conditioned: KV, canonical: KV, layout: Layout, offset: Sequence[int]
) -> tuple[Mapping[str, torch.Tensor], ...]:
    """Δ in the canonical frame: per layer and channel ``[tokens, features]``, float32 or wider.

    ``offset`` (one entry per axis) is the position of the conditioned copy minus that of the
    canonical. Neither input is modified.
    """
    check_kv(canonical, layout)
    back = relocate_kv(_widen(conditioned), layout, [-o for o in offset])
    return tuple(
        {c.name: _flatten(moved[c.name]) - _flatten(_wide(own[c.name])) for c in spec.channels}
        for moved, own, spec in zip(back, canonical, layout, strict=True)
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
    layers: list[dict[str, LowRank]] = [{} for _ in deltas]
    total = lost = 0.0
    for keys, x in stacks(deltas):
        found = strongest(x, rank)
        left, right = found.left.to(dtype), found.right.to(dtype)
        residual = residuals(x, left, right)
        total += float(residual[:, 0].sum())
        lost += float(residual[:, -1].sum())
        for n, (i, name) in enumerate(keys):
            if keep := found.counts[n]:
                # copies in rows: views would keep the whole stack alive
                sides = (
                    side[n, :, :keep].clone(memory_format=torch.contiguous_format) for side in (left, right)
                )
                layers[i][name] = LowRank(*sides)
    return Formed(Patch(tuple(layers)), share_kept(total, lost))


def mean_deficit(
    deficits: Iterable[Deltas],
) -> tuple[Mapping[str, torch.Tensor], ...]:
    """Orbit mean: the average of Δ over orderings of an antecedent set (paper, section 5)."""
    total: list[dict[str, torch.Tensor]] | None = None
    count = 0
    for layers in deficits:
        count += 1
        if total is None:
            total = [{name: delta.clone() for name, delta in layer.items()} for layer in layers]
        else:
            for mine, theirs in zip(total, layers, strict=True):
                for name, delta in theirs.items():
                    mine[name] += delta
    if total is None:
        raise ValueError("the orbit mean needs the deficit of at least one ordering")
    return tuple({name: delta / count for name, delta in layer.items()} for layer in total)


def apply_patch(
    canonical: KV, patch: Patch | None, layout: Layout, offset: Sequence[int]
) -> tuple[LayerKV, ...]:
    """KV of a chunk relocated by ``offset`` from its canonical: R(δ)·canonical + U (R(δ) V)ᵀ (eq. 1).

    Without a patch this is blind reuse. Sums are done in float32 and cast last. Free channels that
    need no correction are shared with the input, so the result must not be written in place. This is
    the slow reference of `kamera.ops.kernels.serve`, which writes into an existing buffer.
    """
    check_kv(canonical, layout)
    if patch is None:
        return relocate_kv(canonical, layout, offset)
    if len(patch.layers) != len(layout):
        raise ValueError(f"patch of {len(patch.layers)} layers, layout of {len(layout)}")
    out = []
    for layer, factors, spec in zip(canonical, patch.layers, layout, strict=True):
        unknown = set(factors) - set(layer)
        if unknown:
            raise ValueError(f"patch names channels {sorted(unknown)}, which the layout lacks")
        out.append(
            {c.name: apply_channel(layer[c.name], factors.get(c.name), c, offset) for c in spec.channels}
        )
    return tuple(out)


def apply_channel(
    x: torch.Tensor, factors: LowRank | None, channel: Channel, offset: Sequence[int]
) -> torch.Tensor:
    """`apply_patch` of one channel ``[heads, tokens, dim]``."""
    wide = x if factors is None else _wide(x)  # one rounding, after the sum
    if channel.rope is not None:
        wide = relocate(wide, channel.rope, offset, rotary_start=channel.rotary_start)
    return wide if factors is None else _add(wide, factors, channel, offset).to(x.dtype)


def turn_factors(factors: LowRank, channel: Channel, offset: Sequence[int]) -> LowRank:
    """R(δ) on the right factor of a phased channel; a free channel's factors are returned as is."""
    if channel.rope is None:
        return factors
    right = _wide(floats(factors.right))
    wide = rearrange(right, "(heads dim) rank -> rank heads dim", heads=channel.heads)
    turned = relocate(wide, channel.rope, offset, rotary_start=channel.rotary_start)
    return LowRank(factors.left, rearrange(turned, "rank heads dim -> rank (heads dim)").T)


def _add(x: torch.Tensor, factors: LowRank, channel: Channel, offset: Sequence[int]) -> torch.Tensor:
    if factors.left.shape[0] != x.shape[1] or factors.right.shape[0] != channel.features:
        raise ValueError(
            f"patch [{factors.left.shape[0]} tokens, {factors.right.shape[0]} features] does not fit "
            f"channel {channel.name} [{x.shape[1]} tokens, {channel.features} features]"
        )
    turned = turn_factors(factors, channel, offset)
    left, right = floats(turned.left), floats(turned.right)
    correction = LowRank(left.to(x.device), right.to(x.device)).dense()
    correction = rearrange(correction, "tokens (heads dim) -> heads tokens dim", heads=channel.heads)
    return (x.to(correction.dtype) + correction).to(x.dtype)


def _flatten(x: torch.Tensor) -> torch.Tensor:
    return rearrange(x, "heads tokens dim -> tokens (heads dim)")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _widen(kv: KV) -> tuple[LayerKV, ...]:
    # Turn back in float32: rounding the turned copy to bf16 first would put noise into the deficit.
    return tuple({name: _wide(t) for name, t in layer.items()} for layer in kv)


def _dtype(kv: KV) -> torch.dtype:
    for layer in kv:
        for tensor in layer.values():
            return tensor.dtype
    return torch.float32
