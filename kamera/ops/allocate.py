"""Where a budget of bytes buys most: a rank for every channel instead of one for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key")


def allocate(gains: Mapping[Key, torch.Tensor], costs: Mapping[Key, int], budget: int) -> dict[Key, int]:
    """How many directions of each channel to keep within ``budget`` bytes.

    ``gains[key]`` are what the directions of a channel buy, strongest first, ``costs[key]`` the bytes of
    each of them. Greedy by gain per byte, which is the optimum up to the last direction; where one rank
    for all buys more (channels of very different cost, a budget of a few directions), that is taken.
    Directions that buy nothing are left out. Raises ValueError for a negative budget, a cost below one
    byte, and gains that grow.
    """
    if budget < 0:
        raise ValueError(f"a budget of {budget} bytes is negative")
    for key, gain in gains.items():
        if costs[key] < 1:
            raise ValueError(f"a direction of {key} costs {costs[key]} bytes: must be at least 1")
        if bool((gain[1:] > gain[:-1]).any()):
            raise ValueError(f"the gains of {key} must not grow: give them strongest first")
    useful = {key: gain[gain > 0].tolist() for key, gain in gains.items()}
    return max(
        (_greedy(useful, costs, budget), _uniform(useful, costs, budget)),
        key=lambda ranks: bought(gains, ranks),
    )


def bought(gains: Mapping[Key, torch.Tensor], ranks: Mapping[Key, int]) -> float:
    """What these ranks buy in all."""
    return sum(float(gain[: ranks[key]].sum()) for key, gain in gains.items())


def _greedy(gains: Mapping[Key, list[float]], costs: Mapping[Key, int], budget: int) -> dict[Key, int]:
    ranks = dict.fromkeys(gains, 0)
    offers = sorted(
        ((gain / costs[key], key) for key, channel in gains.items() for gain in channel),
        key=lambda offer: -offer[0],  # stable: directions of a channel stay in their order
    )
    for _, key in offers:
        # all directions of a channel cost the same: one that does not fit is followed by none that does
        if costs[key] <= budget:
            budget -= costs[key]
            ranks[key] += 1
    return ranks


def _uniform(gains: Mapping[Key, list[float]], costs: Mapping[Key, int], budget: int) -> dict[Key, int]:
    ranks = dict.fromkeys(gains, 0)
    for rank in range(1, 1 + max(map(len, gains.values()), default=0)):
        step = [key for key, channel in gains.items() if len(channel) >= rank]
        price = sum(costs[key] for key in step)
        if price > budget:
            break
        budget -= price
        for key in step:
            ranks[key] = rank
    return ranks
