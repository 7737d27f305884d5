"""Table 1, the shape of the deficit: how deep, how low-rank, how diffuse (paper, section 4)."""

from __future__ import annotations

import torch

from kamera.ops.lowrank import floats
from lab.paper.draw import MAIN, Stage
from lab.paper.tally import Tally

NAME = "deficit"
MASS = 0.9
"""Share of the energy that ranks and tokens are counted for."""

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Relative norms below this are rounding, by the dtype of the KV: they have no rank."""


def measure(stage: Stage, tally: Tally) -> None:
    """Per layer and channel: relative norm, rank for 90 % of the energy; over tokens: concentration."""
    scene = stage.scene(MAIN)
    tokens = scene.target.num_tokens
    by_token = torch.zeros(tokens, dtype=torch.float64)
    for i, (deltas, own, factors) in enumerate(
        zip(scene.delta, scene.canonical, scene.patch.layers, strict=True)
    ):
        for name, delta in deltas.items():
            energy = delta.double().square()
            size = own[name].double().square().sum()
            at: dict[str, str | int] = {"layer": i, "channel": name}
            norm = float((energy.sum() / size).sqrt())
            tally.note(NAME, "relative norm", norm, **at)
            by_token += energy.sum(1) / size
            if norm > ROUNDING[scene.dtype] and name in factors:
                # both factors carry the root of the singular values
                energies = floats(factors[name].left).double().square().sum(0).square()
                rank = _enough(energies)
                tally.note(NAME, "rank for 90 %", rank, **at)
                tally.note(NAME, "rank for 90 % over tokens", rank / tokens, **at)
    if bool(by_token.any()):
        tally.note(NAME, "share of tokens for 90 %", _enough(by_token.sort(descending=True).values) / tokens)


def _enough(energies: torch.Tensor) -> int:
    """How many of the descending ``energies`` hold `MASS` of them."""
    held = energies.cumsum(0) / energies.sum()
    return int((held < MASS).sum()) + 1
