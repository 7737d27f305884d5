"""Patches weighted by the readers of a channel: which directions are kept, where a deficit is truncated.

An error in a cached feature matters as far as queries and output projections read it. `Readers` holds, per
layer, channel and head, the second moment M = E[g gᵀ] of the gradients g with respect to it: an error E of
a deficit costs tr(E M Eᵀ) to first order. All moments are in one unit, so directions of different channels
compare. Gradients on a live model give them (`lab.readers`). No window forms patches so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange

from kamera.ops import Bits, Deltas, Formed, Layout, LowRank
from kamera.ops import factor as plain_factor
from kamera.ops.compress import (
    WIDTHS,
    Candidates,
    Key,
    allot,
    check_fit,
    code_columns,
    cost_of,
    group_size,
    most_paid,
    patch_of_ranks,
    pool_gains,
)
from kamera.ops.factoring import energies, kept_energy, residuals, stacks
from kamera.ops.spectrum import strongest_directions

# No direction is quite unread: other prompts may read what the measured ones did not. Shares of the
# channel's own mean, and of the mean over all channels.
_DAMPING = 1e-2
_FLOOR = 1e-4


@dataclass(frozen=True, eq=False)
class Metric:
    """M^½ and its inverse for one channel, ``[heads, dim, dim]`` each, float64."""

    root: torch.Tensor
    inverse: torch.Tensor

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, features]`` weighted by their readers: x M^½."""
        return _per_head(x, self.root)

    def undo(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `apply`: x M^-½."""
        return _per_head(x, self.inverse)


@dataclass(frozen=True, eq=False)
class Readers:
    """Second moments of the readers of each channel, in the canonical frame.

    Per layer, channel -> ``[heads, dim, dim]``, symmetric and positive semidefinite; heads do not mix,
    as the queries and the output projection of a head group read that head alone.
    """

    layers: tuple[Mapping[str, torch.Tensor], ...]

    def check(self, layout: Layout) -> None:
        """Raise ValueError unless every channel has a finite moment of the right shape."""
        if len(self.layers) != len(layout):
            raise ValueError(f"readers of {len(self.layers)} layers, layout of {len(layout)}")
        for i, (layer, spec) in enumerate(zip(self.layers, layout, strict=True)):
            for c in spec.channels:
                shape = tuple(layer[c.name].shape) if c.name in layer else None
                if shape != (c.heads, c.dim, c.dim):
                    raise ValueError(
                        f"layer {i} channel {c.name}: readers {shape}, expected "
                        f"{(c.heads, c.dim, c.dim)}: measure them on this backbone"
                    )
                if not bool(layer[c.name].isfinite().all()):
                    raise ValueError(f"layer {i} channel {c.name}: readers are not finite: measure again")

    def metric(self, layer: int, channel: str) -> Metric | None:
        """The weights of one channel; None if all moments are zero."""
        moment = self.layers[layer][channel].to(torch.float64)
        floor = _DAMPING * _mean(moment) + _FLOOR * self._overall
        if floor <= 0.0:
            return None
        eye = torch.eye(moment.shape[-1], dtype=torch.float64, device=moment.device)
        values, vectors = torch.linalg.eigh(moment + floor * eye)
        root = values.clamp_min(floor).sqrt().unsqueeze(-2)
        return Metric((vectors * root) @ vectors.mT, (vectors / root) @ vectors.mT)

    @property
    def _overall(self) -> float:
        means = [_mean(m) for layer in self.layers for m in layer.values()]
        return sum(means) / len(means) if means else 0.0


def _mean(moment: torch.Tensor) -> float:
    """Mean moment of a feature: trace over features."""
    return float(moment.to(torch.float64).diagonal(dim1=-2, dim2=-1).mean())


def _per_head(x: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    heads = blocks.shape[0]
    split = rearrange(x.to(torch.float64), "rows (heads dim) -> rows heads dim", heads=heads)
    read = torch.einsum("nhd,hde->nhe", split, blocks.to(x.device))
    return rearrange(read, "rows heads dim -> rows (heads dim)")


def factor(delta: torch.Tensor, rank: int | None, metric: Metric | None) -> LowRank:
    """As `kamera.ops.factor`, best in the norm of Δ M^½: directions that are read least are left out."""
    if metric is None:
        return plain_factor(delta, rank)
    low = plain_factor(metric.apply(delta), rank)
    assert isinstance(low.left, torch.Tensor) and isinstance(low.right, torch.Tensor)
    return LowRank(low.left.to(delta.dtype), metric.undo(low.right.T).T.to(delta.dtype))


def compress(
    deltas: Deltas,
    layout: Layout,
    budget: int,
    readers: Readers,
    *,
    widths: Sequence[Bits] = WIDTHS,
    dtype: torch.dtype = torch.float32,
) -> Formed:
    """As `kamera.ops.compress`, directions weighted by ``readers``."""
    check_fit(deltas, layout, budget)
    readers.check(layout)
    choices: tuple[Bits | None, ...] = tuple(widths) or (None,)
    found: dict[Bits | None, dict[Key, Candidates]] = {bits: {} for bits in choices}
    for _, name, layers, x in stacks(deltas):
        metrics = [readers.metric(i, name) for i in layers]
        made = _candidates(x, metrics, most_paid(x.shape[1:], budget, choices, dtype), choices, dtype)
        for bits, some in zip(choices, made, strict=True):
            found[bits].update(zip([(i, name) for i in layers], some, strict=True))
    ranks = {bits: allot(some, budget, group_size(bits)) for bits, some in found.items()}
    lost = {bits: sum(found[bits][key].residual[k] for key, k in ranks[bits].items()) for bits in choices}
    best = min(choices, key=lambda bits: lost[bits])
    patch = patch_of_ranks(found[best], ranks[best], deltas.groups)
    return Formed(patch, kept_energy(deltas, patch))


def _candidates(
    x: torch.Tensor,
    metrics: Sequence[Metric | None],
    kept: int,
    choices: Sequence[Bits | None],
    dtype: torch.dtype,
) -> Iterator[list[Candidates]]:
    """Candidates of a stack of channels ``x`` in every width; factored once for all widths."""
    pairs = list(zip(metrics, x, strict=True))
    seen = torch.stack([d.to(torch.float64) if m is None else m.apply(d) for m, d in pairs])
    best = strongest_directions(seen, kept)
    right = torch.stack(
        [r if m is None else m.undo(r.mT).mT for m, r in zip(metrics, best.right, strict=True)]
    )
    total = energies(seen)
    for bits in choices:
        lefts, rights = (code_columns(side.to(x.dtype), bits, dtype) for side in (best.left, right))
        shown = torch.stack(
            [
                r.to(torch.float64) if m is None else m.apply(r.mT).mT
                for m, r in zip(metrics, rights[0], strict=True)
            ]
        )
        residual = residuals(seen, lefts[0], shown, total).tolist()
        gains, cost = pool_gains(best.values.square(), group_size(bits)), cost_of(x.shape[1:], bits, dtype)
        yield [
            Candidates((lefts[1], rights[1]), n, most, gain, cost, rest)
            for n, (most, gain, rest) in enumerate(zip(best.counts, gains, residual, strict=True))
        ]
