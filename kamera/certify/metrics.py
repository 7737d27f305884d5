"""What an arm of an evaluation loses, and intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kamera.trust import Estimate

_ROUNDS = 1000
"""Draws of a bootstrap."""


def kl(arm: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KL(arm ‖ reference) in nats of next-token distributions given as logits ``[..., vocabulary]``."""
    log_p, log_q = (torch.log_softmax(logits.double(), -1) for logits in (arm, reference))
    return (log_p.exp() * (log_p - log_q)).sum(-1).clamp_min(0.0).cpu()


def eta(arm: Sequence[float], blind: Sequence[float]) -> float:
    """η = 1 − mean KL(arm ‖ re-prefill) / mean KL(blind ‖ re-prefill); nan if blind reuse loses nothing.

    1 closes the whole gap, 0 none of it, and a harmful arm is negative (paper, section 4).
    """
    gap = float(np.mean(blind)) if len(blind) else 0.0
    return float("nan") if gap == 0.0 else 1.0 - float(np.mean(arm)) / gap


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """Percentile bootstrap of the mean over items."""
    if not len(values):
        return _UNKNOWN
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = data[rng.integers(len(data), size=(_ROUNDS, len(data)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(float(data.mean()), float(low), float(high))


def eta_interval(arm: Sequence[float], blind: Sequence[float]) -> Estimate:
    """`eta` of per-item KLs, with items drawn in pairs; ``mean`` is η of all items.

    Draws in which blind reuse loses nothing have no η and are left out.
    """
    ours, base = np.asarray(arm, dtype=np.float64), np.asarray(blind, dtype=np.float64)
    if ours.shape != base.shape:
        raise ValueError(f"{ours.shape[0]} items of the arm and {base.shape[0]} of blind: ask both the same")
    if not base.sum() > 0:
        return _UNKNOWN
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(base), size=(_ROUNDS, len(base)))
    gaps = base[drawn].mean(1)
    values = 1.0 - ours[drawn].mean(1)[gaps > 0] / gaps[gaps > 0]
    low, high = np.percentile(values, [2.5, 97.5])
    return Estimate(eta(ours.tolist(), base.tolist()), float(low), float(high))


_UNKNOWN = Estimate(float("nan"), float("nan"), float("nan"))
