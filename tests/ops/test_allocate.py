"""Spreading a budget: never over it, and never worse than one rank for all."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import allocate

channels = st.lists(
    st.tuples(st.lists(st.floats(0, 100), max_size=6), st.integers(1, 40)), min_size=0, max_size=5
)


def total_gain(gains, ranks):
    """What these ranks bring in all."""
    return sum(float(gains[key][:rank].sum()) for key, rank in ranks.items())


def shape(drawn):
    gains = {i: torch.tensor(sorted(g, reverse=True), dtype=torch.float64) for i, (g, _) in enumerate(drawn)}
    return gains, {i: cost for i, (_, cost) in enumerate(drawn)}


@given(channels, st.integers(0, 400))
def test_the_budget_holds_and_no_one_rank_for_all_buys_more(drawn, budget):
    gains, costs = shape(drawn)
    ranks = allocate(gains, costs, budget)
    assert ranks.keys() == gains.keys()
    assert sum(costs[k] * r for k, r in ranks.items()) <= budget
    for rank in range(7):
        uniform = {k: min(rank, len(g)) for k, g in gains.items()}
        if sum(costs[k] * r for k, r in uniform.items()) <= budget:
            assert total_gain(gains, ranks) >= total_gain(gains, uniform) - 1e-9


@given(channels, st.integers(1, 40), st.integers(0, 12))
def test_at_one_cost_for_all_nothing_buys_more(drawn, cost, count):
    gains, costs = shape(drawn)
    costs = dict.fromkeys(costs, cost)
    best = sum(
        sorted(itertools.chain.from_iterable(g.tolist() for g in gains.values()), reverse=True)[:count]
    )
    assert total_gain(gains, allocate(gains, costs, cost * count)) == pytest.approx(best)


def test_a_dear_direction_is_worth_its_bytes_or_left():
    gains = {"dear": torch.tensor([10.0, 1.0]), "cheap": torch.tensor([3.0, 2.0, 0.5])}
    costs = {"dear": 4, "cheap": 1}
    assert allocate(gains, costs, 1) == {"dear": 0, "cheap": 1}
    assert allocate(gains, costs, 5) == {"dear": 1, "cheap": 1}
    assert allocate(gains, costs, 100) == {"dear": 2, "cheap": 3}


def test_one_rank_for_all_wins_over_crowding_by_cheap_channels():
    gains = {"dear": torch.tensor([10.0]), "cheap": torch.tensor([2.0, 1.9])}
    assert allocate(gains, {"dear": 10, "cheap": 1}, 11) == {"dear": 1, "cheap": 1}


def test_what_buys_nothing_is_not_bought():
    gains = {"a": torch.tensor([2.0, 0.0, 0.0]), "b": torch.zeros(3)}
    assert allocate(gains, {"a": 1, "b": 1}, 100) == {"a": 1, "b": 0}


@pytest.mark.parametrize(
    ("gains", "costs", "budget", "message"),
    [
        ([1.0], 1, -1, "budget of -1 bytes"),
        ([1.0], 0, 5, "costs 0 bytes"),
        ([1.0, 2.0], 1, 5, "strongest first"),
    ],
)
def test_what_makes_no_sense_is_refused(gains, costs, budget, message):
    with pytest.raises(ValueError, match=message):
        allocate({"a": torch.tensor(gains)}, {"a": costs}, budget)
