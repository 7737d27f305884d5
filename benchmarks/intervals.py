"""Means over documents and what follows from them, with 95 % intervals of a bootstrap over documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 4_000


class Estimate(NamedTuple):
    """A value and its interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_short(self.mean)} [{_short(self.low)}, {_short(self.high)}]"


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one value a document."""
    x = np.asarray(values, dtype=float)
    return _estimate(x.mean(), x[_draws(len(x))].mean(axis=1))


def eta(arm: Sequence[float], blind: Sequence[float]) -> Estimate:
    """1 − mean(arm) / mean(blind): the share of blind reuse's loss that an arm gives back."""
    return _one_minus_ratio(arm, blind)


def restored(restored_counts: Sequence[int], flipped: Sequence[int]) -> Estimate:
    """Of all tokens that blind reuse flips, the share that an arm restores."""
    return _one_minus_ratio([f - r for r, f in zip(restored_counts, flipped, strict=True)], flipped)


def _one_minus_ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    a, b = np.asarray(over, dtype=float), np.asarray(under, dtype=float)
    draws = _draws(len(a))
    with np.errstate(divide="ignore", invalid="ignore"):
        return _estimate(1 - a.mean() / b.mean(), 1 - a[draws].mean(axis=1) / b[draws].mean(axis=1))


def _draws(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, count, (RESAMPLES, count))


def _estimate(value: float, resampled: np.ndarray) -> Estimate:
    low, high = np.nanpercentile(resampled, (2.5, 97.5))
    return Estimate(float(value), float(low), float(high))


def _short(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 0.0995 else f"{value:.3f}"
