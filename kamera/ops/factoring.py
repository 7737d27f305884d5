"""Factoring of deficits: channels of one shape together, and the energy that factors leave out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kamera.ops.lowrank import Deltas, LowRank, Patch
from kamera.ops.spectrum import strongest_directions

STACK_BYTES = 64 * 1024**2
"""Bytes of deficits that are stacked at a time."""


class Stack(NamedTuple):
    """Some layers of one channel: the block's ``group``, the ``channel``, the decoder ``layers``, and their
    deficits ``[layers, tokens, features]``."""

    group: int
    channel: str
    layers: tuple[int, ...]
    x: torch.Tensor


def stacks(deltas: Deltas) -> Iterator[Stack]:
    """All deficits, at most `STACK_BYTES` at a time."""
    for group, (block, layers) in enumerate(zip(deltas.parts, deltas.groups, strict=True)):
        for name, delta in block.items():
            most = max(1, STACK_BYTES * len(layers) // max(1, delta.nbytes))
            for start in range(0, len(layers), most):
                yield Stack(group, name, layers[start : start + most], delta[start : start + most])


def factor(delta: torch.Tensor, rank: int | None = None) -> LowRank:
    """The best rank-``rank`` factors of ``delta`` ``[tokens, features]`` in the Frobenius norm; None: all.

    `strongest_directions` has the bound. Directions without energy are dropped, so the rank of the result can
    be smaller than ``rank``, down to 0.
    """
    if delta.dim() != 2:
        raise ValueError(f"delta must be [tokens, features], got {tuple(delta.shape)}")
    if rank is not None and rank < 0:
        raise ValueError(f"rank {rank} is negative")
    best = strongest_directions(delta[None], rank)
    keep = best.counts[0]
    return LowRank(best.left[0, :, :keep].to(delta.dtype), best.right[0, :, :keep].to(delta.dtype))


def kept_energy(deltas: Deltas, patch: Patch) -> float:
    """Share of the deficit's energy that the patch keeps: 1 − ‖Δ − patch‖² / ‖Δ‖², at least 0."""
    total, lost = _energy_and_loss(deltas, patch)
    return share_kept(float(total.sum()), float(lost.sum()))


FAINT = 1e-3
"""Share of the strongest layer and channel's energy below which a deficit is rounding."""


def patch_error(deltas: Deltas, patch: Patch) -> float:
    """The largest share of a layer's and channel's deficit that the patch leaves out, in energy; 0.0 to 1.0.

    What is fainter than `FAINT` of the strongest is measured against that: the first layer's values absorb
    nothing, and what is left of them is rounding. A NaN counts as 1.0.
    """
    return _worst(*_energy_and_loss(deltas, patch))


def spread_error(energies: torch.Tensor, count: int, mean: Deltas, patch: Patch) -> float:
    """As `patch_error`, of a patch of the ``mean`` of ``count`` deficits, against all of these.

    ``energies`` is the sum of theirs by layer and channel, as `deficit_energies` gives them. What the
    deficits differ by is in it: Σ‖Δ − P‖² = Σ‖Δ‖² − n‖M‖² + n‖M − P‖².
    """
    own, lost = _energy_and_loss(mean, patch)
    return _worst(energies, (energies - count * own).clamp_min(0.0) + count * lost)


def deficit_energies(deltas: Deltas) -> torch.Tensor:
    """‖Δ‖² of each layer and channel, float64 ``[layers · channels]``."""
    each = [energies(x).cpu() for block in deltas.parts for x in block.values()]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *each])


def _worst(total: torch.Tensor, lost: torch.Tensor) -> float:
    if not total.numel() or not float(total.max()) > 0.0:
        return 0.0
    error = float((lost / total.clamp_min(FAINT * float(total.max()))).max())
    return min(1.0, max(0.0, error)) if math.isfinite(error) else 1.0


def _energy_and_loss(deltas: Deltas, patch: Patch) -> tuple[torch.Tensor, torch.Tensor]:
    """‖Δ‖² and ‖Δ − patch‖² of each layer and channel, float64 ``[layers · channels]``."""
    if len(deltas) != len(patch.blocks):
        raise ValueError(f"deficits of {len(deltas)} layers, patch of {len(patch.blocks)}")
    totals, losses = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64)]
    held = patch.regroup(deltas.groups).blocks
    for block, factors in zip(deltas.parts, held.parts, strict=True):
        for name, x in block.items():
            low = factors.get(name)
            both = (x[:, :, :0], x[:, :0].mT) if low is None else low.pad()
            residual = residuals(x, both[0].to(x), both[1].to(x))
            totals.append(residual[:, 0].cpu())
            losses.append(residual[:, -1].cpu())
    return torch.cat(totals), torch.cat(losses)


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
