"""Allocation of a budget of bytes: a rank for every channel instead of one for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch

Key = TypeVar("Key")


def allocate(gains: Mapping[Key, torch.Tensor], costs: Mapping[Key, int], budget: int) -> dict[Key, int]:
    """Rank of each channel within ``budget`` bytes.

    ``gains[key]`` are the gains of a channel's directions, strongest first, ``costs[key]`` the bytes of
    each of them. Greedy by gain per byte, which is optimal up to the last direction; one rank for all is
    taken if its total gain is larger (channels of very different cost, a budget of a few directions).
    Directions without gain are left out. Raises ValueError for a negative budget, a cost below one byte,
    and gains that grow.
    """
    if budget < 0:
        raise ValueError(f"a budget of {budget} bytes is negative")
    for key, gain in gains.items():
        if costs[key] < 1:
            raise ValueError(f"a direction of {key} costs {costs[key]} bytes: must be at least 1")
        if bool((gain[1:] > gain[:-1]).any()):
            raise ValueError(f"the gains of {key} must not grow: give them strongest first")
    channels = _Channels.of(gains, costs)
    choices = (_allocate_greedily(channels, budget), _allocate_evenly(channels, budget))
    best = max(choices, key=channels.gain)
    return dict(zip(gains, best.tolist(), strict=True))


class _Channels(NamedTuple):
    """Gains of n channels ``[n, directions]``, padded with zeros; ``useful`` [n] counts those above zero."""

    gains: np.ndarray
    useful: np.ndarray
    costs: np.ndarray

    @classmethod
    def of(cls, gains: Mapping[Key, torch.Tensor], costs: Mapping[Key, int]) -> _Channels:
        table = np.zeros((len(gains), max(map(len, gains.values()), default=0)))
        for row, gain in zip(table, gains.values(), strict=True):
            row[: len(gain)] = gain.tolist()
        return cls(table, (table > 0).sum(1), np.array(list(map(costs.__getitem__, gains)), dtype=np.int64))

    def gain(self, ranks: np.ndarray) -> float:
        """Total gain of ``ranks`` [n]."""
        return float(self.gains[np.arange(self.gains.shape[1]) < ranks[:, None]].sum())


def _allocate_greedily(channels: _Channels, budget: int) -> np.ndarray:
    ranks = np.zeros_like(channels.costs)
    per_byte = channels.gains / channels.costs[:, None]
    # a stable sort keeps the directions of a channel in order
    for place in np.argsort(-per_byte, axis=None, kind="stable")[: int(channels.useful.sum())].tolist():
        channel = place // channels.gains.shape[1]
        # all directions of a channel cost the same: one that does not fit is followed by none that does
        if channels.costs[channel] <= budget:
            budget -= channels.costs[channel]
            ranks[channel] += 1
    return ranks


def _allocate_evenly(channels: _Channels, budget: int) -> np.ndarray:
    steps = np.arange(1, 1 + channels.gains.shape[1])
    prices = np.where(channels.useful[:, None] >= steps, channels.costs[:, None], 0).sum(0)
    affordable = int((prices.cumsum() <= budget).sum())
    return np.minimum(channels.useful, affordable)
