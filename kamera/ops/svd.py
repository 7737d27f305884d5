"""The strongest directions of many matrices of one shape at once.

Two methods give the same factors. *Exact*: all eigenvectors of the smaller Gram matrix, in float64.
*Sketched*, for ranks far below the smaller side: subspace iteration from a fixed random start, with a few
passes over the matrices and eigenvectors of small Gram matrices only. Each pass bounds the energy that later
ones could still find; matrices above `TOLERANCE` are factored exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kamera.ops.kv import check_deficit
from kamera.ops.lowrank import Deltas, LowRank, Patch

# Directions weaker than this share of the strongest one are rounding, not signal. A Gram matrix in float64
# squares the singular values, so it resolves them only to the root of its precision; a pass over entries of
# less precision finds nothing below a few of their own roundings.
_GRAM_NOISE = 1e-7
_ROUNDINGS = 16.0

SEED = 0
"""Seed of the random start: equal deficits have equal factors in every process."""

PASSES = 8
"""Most passes over the matrices before the exact method."""

TOLERANCE = 5e-5
"""Share of the kept energy that a sketch may miss."""

# Share of the average kept energy that a matrix may miss: one that is float32 rounding next to the others
# has no directions that matter.
_FAINT = 1e-9


class Directions(NamedTuple):
    """Matrices ≈ ``left @ right.mT``, ``[n, tokens, m]`` and ``[n, features, m]``, strongest first.

    The columns of each side are orthogonal, and a singular value is split evenly between its two.
    ``values`` ``[n, m]`` are the singular values in float64. ``counts`` says how many directions of each
    matrix carry signal; the columns and values beyond are zero.
    """

    left: torch.Tensor
    right: torch.Tensor
    values: torch.Tensor
    counts: list[int]


class _Found(NamedTuple):
    """Directions before any is dropped: columns of ``unit`` have length one, of ``image`` ``values``."""

    unit: torch.Tensor
    image: torch.Tensor
    values: torch.Tensor
    tokens_first: bool  # unit is the token side


def strongest_directions(x: torch.Tensor, rank: int | None = None) -> Directions:
    """The best factors of rank ``rank`` (all directions for None) of each of ``x`` ``[n, tokens, features]``.

    Sketched factors together keep all but `TOLERANCE` of the energy that the best factors keep.
    Deterministic; in the dtype of ``x``. Raises NonFiniteKV for a NaN or an infinity in ``x``.
    """
    check_deficit(x)
    smaller = min(x.shape[1:])
    rank = smaller if rank is None else min(rank, smaller)
    width = max(2 * rank, rank + 16)
    if rank == 0 or 0 in x.shape or 4 * width > smaller:
        return _directions(_exact(x, rank), _GRAM_NOISE, x.dtype)
    found, sure = _sketch(x, rank, width)
    noise = max(_GRAM_NOISE, _ROUNDINGS * torch.finfo(found.unit.dtype).eps)
    sketched = _directions(found, noise, x.dtype)
    again = [i for i, good in enumerate(sure.tolist()) if not good]
    if not again:
        return sketched
    exact = _directions(_exact(x[again], rank), _GRAM_NOISE, x.dtype)
    counts = list(sketched.counts)
    for mine, theirs in zip(sketched[:3], exact[:3], strict=True):
        mine[again] = theirs
    for i, count in zip(again, exact.counts, strict=True):
        counts[i] = count
    return sketched._replace(counts=counts)


def _directions(found: _Found, noise: float, dtype: torch.dtype) -> Directions:
    values = found.values
    signal = values > noise * values[:, :1]
    values = torch.where(signal, values, 0.0)
    root = values.sqrt().to(found.unit.dtype).unsqueeze(1)
    unit = (found.unit * root).to(dtype)
    image = (found.image * torch.where(root > 0, 1.0 / root, 0.0)).to(dtype)
    left, right = (unit, image) if found.tokens_first else (image, unit)
    return Directions(left, right, values, signal.sum(1).tolist())


def _exact(x: torch.Tensor, rank: int) -> _Found:
    wide = x.to(torch.float64)
    tokens_first = x.shape[1] <= x.shape[2]
    if not tokens_first:
        wide = wide.mT
    energies, vectors = torch.linalg.eigh(wide @ wide.mT)
    values = energies.flip(1)[:, :rank].clamp_min(0.0).sqrt()
    unit = vectors.flip(2)[:, :, :rank]
    return _Found(unit, wide.mT @ unit, values, tokens_first)


def _sketch(x: torch.Tensor, rank: int, width: int) -> tuple[_Found, torch.Tensor]:
    """Directions by subspace iteration, and a mask ``[n]``: True if they keep enough energy."""
    work = x.to(torch.promote_types(x.dtype, torch.float32))
    draw = torch.randn(x.shape[2], width, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    image = (work @ draw.to(work)).to(torch.float64)
    values, axes = _axes(image)
    kept = values[:, 0] * 0.0
    turn, sure = 0, kept == 0.0
    for turn in range(PASSES):
        unit = image @ (axes * _inverse(values).unsqueeze(1))
        image = ((work.mT, work)[turn % 2] @ unit.to(work)).to(torch.float64)
        values, axes = _axes(image)
        gained, kept = -kept, values[:, :rank].square().sum(1)
        gained += kept
        if turn == 0:
            continue
        # An error in a wanted direction shrinks in every pass by the energy beyond the sketch over its own.
        # The middle of the sketch stands for "beyond": the outermost directions converge last.
        shrink = (values[:, (rank + width) // 2] * _inverse(values[:, rank - 1])).square().clamp_max(0.999)
        missed = gained.clamp_min(0.0) * shrink / (1.0 - shrink)
        allowed = TOLERANCE * kept + _FAINT * kept.mean()
        sure = missed <= allowed
        hopeful = missed * shrink ** (PASSES - 1 - turn) <= allowed
        if not bool((hopeful & ~sure).any()):
            break
    axes = axes[:, :, :rank]
    return _Found(unit @ axes, image @ axes, values[:, :rank], turn % 2 == 0), sure


def _axes(image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Singular values, descending, and right singular vectors of thin matrices ``[n, rows, width]``.

    Small Gram matrices are solved on the CPU: a GPU solves them one by one, in over a hundred launches each.
    """
    energies, axes = torch.linalg.eigh((image.mT @ image).cpu())
    return energies.flip(1).clamp_min(0.0).sqrt().to(image.device), axes.flip(2).to(image.device)


def _inverse(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values > 0.0, 1.0 / values, 0.0)


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
