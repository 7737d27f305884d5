"""Factoring of deficits: channels of one shape together, and the energy that factors leave out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kamera.ops.lowrank import Deltas, LowRank, Patch, floats
from kamera.ops.readers import Metric
from kamera.ops.spectrum import strongest

STACK_BYTES = 64 * 1024**2
"""Bytes of deficits that are stacked at a time."""


class Stack(NamedTuple):
    """Channels of one shape: ``keys`` (layer, channel), and their deficits ``[n, tokens, features]``."""

    keys: list[tuple[int, str]]
    x: torch.Tensor


def stacks(deltas: Deltas) -> Iterator[Stack]:
    """All deficits in stacks of one shape, dtype and device. Lazy: one copy at a time."""
    alike: dict[tuple[object, ...], list[tuple[int, str]]] = {}
    for i, layer in enumerate(deltas):
        for name, delta in layer.items():
            alike.setdefault((delta.shape, delta.dtype, delta.device), []).append((i, name))
    for keys in alike.values():
        i, name = keys[0]
        most = max(1, STACK_BYTES // max(1, deltas[i][name].nbytes))
        for start in range(0, len(keys), most):
            some = keys[start : start + most]
            yield Stack(some, torch.stack([deltas[i][name] for i, name in some]))


def factor(delta: torch.Tensor, rank: int | None = None, metric: Metric | None = None) -> LowRank:
    """The best rank-``rank`` factors of ``delta`` ``[tokens, features]``; all of them for None.

    Best in the Frobenius norm, or with a metric M in that of Δ M^½, which leaves out the directions that
    the channel's readers weight least; `strongest` has the bound. Directions without energy are dropped, so
    the rank of the result can be smaller than ``rank``, down to 0.
    """
    if delta.dim() != 2:
        raise ValueError(f"delta must be [tokens, features], got {tuple(delta.shape)}")
    if rank is not None and rank < 0:
        raise ValueError(f"rank {rank} is negative")
    found = strongest((delta if metric is None else metric.apply(delta))[None], rank)
    keep = found.counts[0]
    left, right = found.left[0, :, :keep], found.right[0, :, :keep]
    if metric is not None:
        right = metric.undo(right.T).T
    return LowRank(left.to(delta.dtype), right.to(delta.dtype))


def kept_energy(deltas: Deltas, patch: Patch) -> float:
    """Share of the deficit's energy that the patch keeps: 1 − ‖Δ − patch‖² / ‖Δ‖², at least 0."""
    if len(deltas) != len(patch.layers):
        raise ValueError(f"deficits of {len(deltas)} layers, patch of {len(patch.layers)}")
    total = lost = 0.0
    for keys, x in stacks(deltas):
        held = [patch.layers[i].get(name) for i, name in keys]
        most = max((low.rank for low in held if low is not None), default=0)
        left, right = x.new_zeros(*x.shape[:2], most), x.new_zeros(x.shape[0], x.shape[2], most)
        for n, low in enumerate(held):
            if low is not None:
                left[n, :, : low.rank] = floats(low.left).to(x)
                right[n, :, : low.rank] = floats(low.right).to(x)
        residual = residuals(x, left, right)
        total += float(residual[:, 0].sum())
        lost += float(residual[:, -1].sum())
    return share_kept(total, lost)


def share_kept(total: float, lost: float) -> float:
    """1 − ``lost`` / ``total`` within 0 and 1; 1.0 if ``total`` is 0."""
    return 1.0 if total == 0.0 else min(1.0, max(0.0, 1.0 - lost / total))


def energies(x: torch.Tensor) -> torch.Tensor:
    """‖x‖² of each matrix of ``[n, tokens, features]``, float64 ``[n]``."""
    return torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float64).square()


def residuals(
    x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Energy ‖x − left rightᵀ‖² with the first k columns of both factors, float64 ``[n, m + 1]``.

    From ‖x‖² − 2⟨x, left rightᵀ⟩ + ‖left rightᵀ‖², so that no ``[tokens, features]`` product is formed; off
    by the rounding of ‖x‖² in the dtype of ``x``. ``total`` are the `energies` of ``x``, if known.
    """
    total = (energies(x) if total is None else total).unsqueeze(1)
    wide, other = left.to(torch.float64), right.to(torch.float64)
    met = (x @ right.to(x)).to(torch.float64).mul_(wide).sum(1)
    both = (wide.mT @ wide).mul_(other.mT @ other)
    squares = both.cumsum(1).cumsum(2).diagonal(dim1=1, dim2=2)
    rest = total - 2.0 * met.cumsum(1) + squares
    return torch.cat((total, rest.clamp_min(0.0)), dim=1)
