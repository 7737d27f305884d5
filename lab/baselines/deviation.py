"""How far each token's KV is from another copy of it, the measure by which tokens are chosen."""

from __future__ import annotations

import torch

from kamera.ops import LayerKV


def deviation(fresh: LayerKV, held: LayerKV) -> torch.Tensor:
    """Squared distance of each token's KV at one layer, float64 ``[tokens]``.

    A channel counts by its share of its own energy (the held copy's), so that K does not drown V only
    because its numbers are larger. Turning a phase changes nothing: both copies stand at one place.
    """
    total = torch.zeros(next(iter(held.values())).shape[1], dtype=torch.float64)
    for name, old in held.items():
        wide = old.double()
        scale = wide.square().sum().clamp_min(1e-30)
        total += ((fresh[name].double() - wide).square().sum((0, 2)) / scale).cpu()
    return total


def highest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` highest scores, ascending; of equal ones the first."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values
