"""Conditioning patches: low-rank factors of what a chunk absorbs from its antecedents.

Δ = KV(B|A) − KV(B|∅) is taken in the *canonical frame*: phased channels of the conditioned copy are
first turned back to the canonical's positions. The patch is then rotated together with the chunk,
so one patch serves every position, and because the offset is the same for every token only the
small right factor turns: R(δ)(U Vᵀ) = U (R(δ) V)ᵀ (DESIGN, section 2; paper, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kamera.ops.kv import KV, LayerKV
from kamera.ops.layout import Channel, Layout, check_kv, relocate_kv
from kamera.ops.rope import relocate

# Directions weaker than this share of the strongest one are rounding, not signal. A Gram matrix in
# float64 squares the singular values, so it resolves them only to the root of its precision.
_NOISE = 1e-10
_GRAM_NOISE = 1e-7


@dataclass(frozen=True, eq=False)
class LowRank:
    """Factors of one channel's deficit: Δ ≈ ``left @ right.T``.

    ``left`` is ``[tokens, m]``, ``right`` ``[features, m]`` (heads flattened). Columns are ordered by
    the energy they carry, so a prefix of them is the best approximation of its rank.
    """

    left: torch.Tensor
    right: torch.Tensor

    def __post_init__(self) -> None:
        if self.left.dim() != 2 or self.right.dim() != 2:
            raise ValueError(
                f"factors must be matrices, got {tuple(self.left.shape)}, {tuple(self.right.shape)}"
            )
        if self.left.shape[1] != self.right.shape[1]:
            raise ValueError(
                f"left has rank {self.left.shape[1]} and right {self.right.shape[1]}: must be equal"
            )

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.left.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return sum(t.numel() * t.element_size() for t in (self.left, self.right))

    def dense(self) -> torch.Tensor:
        """``[tokens, features]`` in float32 (float64 for float64 factors)."""
        work = torch.promote_types(self.left.dtype, torch.float32)
        return self.left.to(work) @ self.right.to(work).T

    def truncate(self, rank: int) -> LowRank:
        """The ``rank`` strongest directions (all of them when there are fewer)."""
        if rank < 0:
            raise ValueError(f"rank {rank} is negative")
        return LowRank(self.left[:, :rank], self.right[:, :rank])

    def rerank(self, rank: int | None = None) -> LowRank:
        """Re-order arbitrary factors by energy, and keep ``rank``: the SVD of ``left @ right.T``.

        Costs a QR of each factor and an SVD of ``[m, m]``; Δ itself is never formed.
        """
        work = torch.float64
        q_left, r_left = torch.linalg.qr(self.left.to(work))
        q_right, r_right = torch.linalg.qr(self.right.to(work))
        u, s, vh = torch.linalg.svd(r_left @ r_right.T)
        keep = _significant(s, rank, _NOISE)
        root = s[:keep].sqrt()
        return LowRank(
            (q_left @ u[:, :keep] * root).to(self.left.dtype),
            (q_right @ vh[:keep].T * root).to(self.right.dtype),
        )


@dataclass(frozen=True, eq=False)
class Patch:
    """Low-rank factors for every layer and channel of one chunk behind given antecedents.

    A channel that is not named needs no correction (layer 0 never does: no attention precedes it).
    """

    layers: tuple[Mapping[str, LowRank], ...]

    @property
    def rank(self) -> int:
        """The largest rank of any channel."""
        return max((f.rank for layer in self.layers for f in layer.values()), default=0)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the chunk it corrects, or None when it corrects nothing."""
        for layer in self.layers:
            for factors in layer.values():
                return factors.left.shape[0]
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(f.nbytes for layer in self.layers for f in layer.values())

    def truncate(self, rank: int) -> Patch:
        """Keep the ``rank`` strongest directions of every channel; rank 0 corrects nothing."""
        return self._map(lambda f: f.truncate(rank))

    def rerank(self, rank: int | None = None) -> Patch:
        """`LowRank.rerank` on every channel."""
        return self._map(lambda f: f.rerank(rank))

    def _map(self, function: Callable[[LowRank], LowRank]) -> Patch:
        layers = []
        for layer in self.layers:
            mapped = {name: function(f) for name, f in layer.items()}
            layers.append({name: f for name, f in mapped.items() if f.rank})
        return Patch(tuple(layers))


class Formed(NamedTuple):
    """A patch and the share of the deficit's energy it kept (1.0 when there was no deficit)."""

    patch: Patch
    energy: float


def deficit(
    conditioned: KV, canonical: KV, layout: Layout, offset: Sequence[int]
) -> tuple[Mapping[str, torch.Tensor], ...]:
    """Δ in the canonical frame: per layer and channel ``[tokens, features]``, float32 or wider.

    ``offset`` (one entry per axis) is where the conditioned copy stands minus where the canonical
    does. Neither input is modified.
    """
    check_kv(canonical, layout)
    back = relocate_kv(_widen(conditioned), layout, [-o for o in offset])
    return tuple(
        {c.name: _flatten(moved[c.name]) - _flatten(_wide(own[c.name])) for c in spec.channels}
        for moved, own, spec in zip(back, canonical, layout, strict=True)
    )


def factor(delta: torch.Tensor, rank: int | None = None) -> LowRank:
    """The best rank-``rank`` factors of ``delta`` ``[tokens, features]``; all of them for None.

    Truncated SVD by way of the smaller Gram matrix in float64. Directions without energy are
    dropped, so the rank of the result can be smaller than asked, down to 0.
    """
    if delta.dim() != 2:
        raise ValueError(f"delta must be [tokens, features], got {tuple(delta.shape)}")
    if rank is not None and rank < 0:
        raise ValueError(f"rank {rank} is negative")
    wide = delta.to(torch.float64)
    tokens, features = wide.shape
    gram = wide @ wide.T if tokens <= features else wide.T @ wide
    energies, vectors = torch.linalg.eigh(gram)
    s = energies.clamp_min(0).sqrt().flip(0)
    vectors = vectors.flip(1)
    keep = _significant(s, rank, _GRAM_NOISE)
    root = s[:keep].sqrt()
    basis = vectors[:, :keep]
    if tokens <= features:
        left, right = basis * root, wide.T @ basis / root
    else:
        left, right = wide @ basis / root, basis * root
    return LowRank(left.to(delta.dtype), right.to(delta.dtype))


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


def patch_of(deltas: Sequence[Mapping[str, torch.Tensor]], rank: int | None, dtype: torch.dtype) -> Formed:
    """Factor deficits (as `deficit` gives them) into a patch."""
    layers: list[dict[str, LowRank]] = []
    total = kept = 0.0
    for layer in deltas:
        factors: dict[str, LowRank] = {}
        for name, delta in layer.items():
            low = factor(delta, rank)
            total += float(delta.double().square().sum())
            # both factors carry sqrt(s): column norms multiply to s
            kept += float((low.left.double().square().sum(0) * low.right.double().square().sum(0)).sum())
            if low.rank:
                factors[name] = LowRank(low.left.to(dtype), low.right.to(dtype))
        layers.append(factors)
    return Formed(Patch(tuple(layers)), 1.0 if total == 0 else min(1.0, kept / total))


def mean_deficit(
    deficits: Iterable[Sequence[Mapping[str, torch.Tensor]]],
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
    """Serve a chunk at ``offset`` from its canonical place: R(δ)·canonical + U (R(δ) V)ᵀ (eq. 1).

    Without a patch this is blind reuse. Sums are done in float32 and cast last. Free channels that
    need no correction are shared with the input, so the result must not be written in place.
    """
    moved = relocate_kv(canonical, layout, offset)
    if patch is None:
        return moved
    if len(patch.layers) != len(layout):
        raise ValueError(f"patch of {len(patch.layers)} layers, layout of {len(layout)}")
    out = []
    for layer, factors, spec in zip(moved, patch.layers, layout, strict=True):
        unknown = set(factors) - set(layer)
        if unknown:
            raise ValueError(f"patch names channels {sorted(unknown)} the layout does not have")
        served = dict(layer)
        for c in spec.channels:
            if c.name in factors:
                served[c.name] = _add(layer[c.name], factors[c.name], c, offset)
        out.append(served)
    return tuple(out)


def turn_factors(factors: LowRank, channel: Channel, offset: Sequence[int]) -> LowRank:
    """R(δ) on the right factor of a phased channel; a free channel's factors are returned as is."""
    if channel.rope is None:
        return factors
    rank = factors.rank
    wide = _wide(factors.right).T.reshape(rank, channel.heads, channel.dim)
    turned = relocate(wide, channel.rope, offset, rotary_start=channel.rotary_start)
    return LowRank(factors.left, turned.reshape(rank, channel.features).T)


def _add(x: torch.Tensor, factors: LowRank, channel: Channel, offset: Sequence[int]) -> torch.Tensor:
    if factors.left.shape[0] != x.shape[1] or factors.right.shape[0] != channel.features:
        raise ValueError(
            f"patch [{factors.left.shape[0]} tokens, {factors.right.shape[0]} features] does not fit "
            f"channel {channel.name} [{x.shape[1]} tokens, {channel.features} features]"
        )
    turned = turn_factors(factors, channel, offset)
    left, right = turned.left.to(x.device), turned.right.to(x.device)
    correction = LowRank(left, right).dense()
    correction = correction.reshape(x.shape[1], channel.heads, channel.dim).transpose(0, 1)
    return (x.to(correction.dtype) + correction).to(x.dtype)


def _significant(s: torch.Tensor, rank: int | None, noise: float) -> int:
    """How many of the descending singular values ``s`` carry signal, at most ``rank``."""
    if s.numel() == 0 or float(s[0]) == 0.0:
        return 0
    count = int((s > s[0] * noise).sum())
    return count if rank is None else min(count, rank)


def _flatten(x: torch.Tensor) -> torch.Tensor:
    """``[heads, tokens, dim]`` to ``[tokens, heads * dim]``."""
    return x.transpose(0, 1).flatten(1)


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
