"""Patches by budget: bytes where they buy most, and never a byte too many."""

from __future__ import annotations

import itertools

import pytest
import torch

from kamera.ops import (
    LowRank,
    Patch,
    apply_patch,
    compress,
    deficit,
    kv_bytes,
    kv_map,
    kv_of,
    patch_of,
)
from tests.ops.test_patch import LAYOUT, assert_same, pair


def deltas_of(dtype=torch.float64):
    canonical, _, moved, offset = pair(dtype)
    return deficit(moved, canonical, LAYOUT, offset), canonical, moved, offset


def test_a_budget_for_all_is_a_full_patch():
    deltas, canonical, moved, offset = deltas_of()
    budget = 10 * kv_bytes(canonical)
    formed = compress(deltas, LAYOUT, budget, widths=(), dtype=torch.float64)
    assert formed.energy == pytest.approx(1.0, abs=1e-12)
    assert_same(apply_patch(canonical, formed.patch, LAYOUT, offset), moved, rtol=0, atol=1e-6)
    coded = compress(deltas, LAYOUT, budget)
    assert coded.energy > 1 - 1e-3
    assert coded.patch.nbytes <= budget


@pytest.mark.parametrize("widths", [(), (8,), (4,), (8, 4)])
def test_no_budget_is_exceeded_and_more_bytes_are_never_worse(widths):
    deltas, *_ = deltas_of(torch.float32)
    energies = []
    for budget in (0, 1, 60, 150, 400, 900, 3000, 10_000):
        formed = compress(deltas, LAYOUT, budget, widths=widths)
        assert formed.patch.nbytes <= budget
        assert len(formed.patch.layers) == len(LAYOUT)
        energies.append(left_of(deltas, formed.patch))
    assert energies[0] == pytest.approx(left_of(deltas, None))
    assert compress(deltas, LAYOUT, 20).patch.layers == ({}, {})  # no direction costs so little
    assert all(more <= less * (1 + 1e-2) for less, more in itertools.pairwise(energies))
    assert energies[-1] < (0.1 if widths == (4,) else 0.02) * energies[0]


def left_of(deltas, patch) -> float:
    """What readers see of what the patch does not bring back."""
    lost = 0.0
    for i, layer in enumerate(deltas):
        for name, delta in layer.items():
            error = delta.double()
            if patch is not None and name in patch.layers[i]:
                error = error - patch.layers[i][name].dense().double()
            lost += float(error.norm()) ** 2
    return lost


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_at_the_bytes_of_a_uniform_patch_less_is_left_behind(rank):
    deltas, *_ = deltas_of(torch.float32)
    uniform = patch_of(deltas, rank, torch.float32).patch
    spread = compress(deltas, LAYOUT, uniform.nbytes, widths=())
    coded = compress(deltas, LAYOUT, uniform.nbytes)
    assert left_of(deltas, spread.patch) <= left_of(deltas, uniform) * (1 + 1e-9)
    assert left_of(deltas, coded.patch) < left_of(deltas, spread.patch)


@pytest.mark.parametrize("budget", [120, 300, 800, 5000])
def test_of_two_widths_the_one_that_leaves_less_is_stored(budget):
    deltas, *_ = deltas_of(torch.float32)
    either, eight, four = (compress(deltas, LAYOUT, budget, widths=w).patch for w in ((8, 4), (8,), (4,)))
    best = min(left_of(deltas, eight), left_of(deltas, four))
    assert left_of(deltas, either) == pytest.approx(best)


def test_no_deficit_needs_no_bytes():
    deltas = kv_map(deltas_of()[0], torch.zeros_like)
    formed = compress(deltas, LAYOUT, 10_000)
    assert formed.patch.layers == ({}, {})
    assert formed.energy == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: compress(d, LAYOUT, -1), "budget of -1 bytes"),
        (lambda d: compress(kv_of(d[:1]), LAYOUT, 9), "deficits of 1 layers, layout of 2"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    deltas, *_ = deltas_of()
    with pytest.raises(ValueError, match=message):
        change(deltas)


def test_factors_in_codes_and_in_floats_serve_alike():
    deltas, canonical, _, offset = deltas_of(torch.float32)
    coded = compress(deltas, LAYOUT, 2000).patch
    plain = Patch.of(
        [{n: LowRank(f.left.dense(), f.right.dense()) for n, f in layer.items()} for layer in coded.layers]
    )
    served, want = (apply_patch(canonical, p, LAYOUT, offset) for p in (coded, plain))
    assert_same(served, want, rtol=0, atol=1e-6)
