"""What an arm of an evaluation is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


def kl(arm: torch.Tensor, reference: torch.Tensor) -> float:
    """KL(arm ‖ reference) in nats of two next-token distributions given as logits ``[vocabulary]``."""
    log_p = torch.log_softmax(arm.double(), -1)
    log_q = torch.log_softmax(reference.double(), -1)
    return float((log_p.exp() * (log_p - log_q)).sum().clamp_min(0.0))


def eta(arm: Sequence[float], blind: Sequence[float]) -> float:
    """η = 1 − mean KL(arm ‖ re-prefill) / mean KL(blind ‖ re-prefill); nan when blind loses nothing.

    1 closes the whole gap, 0 none of it, and a harmful arm is negative (paper, section 4).
    """
    gap = float(np.mean(blind)) if len(blind) else 0.0
    return float("nan") if gap == 0.0 else 1.0 - float(np.mean(arm)) / gap


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], seed: int = 0, rounds: int = 1000) -> Interval:
    """Percentile bootstrap of the mean over items."""
    if not len(values):
        return Interval(float("nan"), float("nan"), float("nan"))
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = data[rng.integers(len(data), size=(rounds, len(data)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(data.mean()), float(low), float(high))
