"""Muon: momentum whose step is the nearest orthogonal matrix (Jordan et al., 2024), in float32.

torch's own runs the iteration in bfloat16, which CPUs without that unit do slowly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic iteration's, chosen for slope at zero: singular values end between .7 and 1.2."""
ROUNDS = 5


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """About the nearest orthogonal matrix of each of `[n, rows, columns]`."""
    a, b, c = COEFFICIENTS
    wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if wide else matrices.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """For matrices only; those of one shape are stepped as one batch."""

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step along the orthogonalised Nesterov momentum."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append((matrix, matrix.grad))
            for shape, pairs in by_shape.items():
                pushes = []
                for matrix, grad in pairs:
                    state = self.state[matrix]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(matrix)
                    state["momentum"].lerp_(grad, 1 - group["momentum"])
                    pushes.append(grad.lerp(state["momentum"], group["momentum"]))
                steps = orthogonal(torch.stack(pushes))
                scale = -group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for (matrix, _), step in zip(pairs, steps, strict=True):
                    matrix.add_(step, alpha=scale)
