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
