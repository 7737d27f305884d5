"""Patches by budget: bytes where they buy most, and never a byte too many."""

from __future__ import annotations

import itertools

import pytest
import torch

from kamera.ops import (
    apply_patch,
    compress,
    deficit,
    kv_bytes,
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
