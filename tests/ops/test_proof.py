"""Proofs held against the definition, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import Proof, compared
from kamera.ops.proof import DECIDED


def slowly(true, patched) -> tuple[float, int, int]:
    """Largest KL, flips and tokens, by the definition."""
    kl, flips, tokens = 0.0, 0, 0
    for want, got in zip(true, patched, strict=True):
        for row, other in zip(want.double().tolist(), got.double().tolist(), strict=True):
            p = [x - math.log(sum(math.exp(y) for y in row)) for x in row]
            q = [x - math.log(sum(math.exp(y) for y in other)) for x in other]
            kl = max(kl, sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
            flips += max(p) - p[q.index(max(q))] > DECIDED
            tokens += 1
    return kl, flips, tokens


@given(st.integers(0, 10_000), st.lists(st.integers(1, 5), min_size=1, max_size=4), st.floats(0.0, 2.0))
def test_it_is_the_largest_divergence_and_the_flips(seed, lengths, noise):
    drawn = torch.Generator().manual_seed(seed)
    true = [torch.randn(n, 7, generator=drawn) for n in lengths]
    patched = [t + noise * torch.randn(t.shape, generator=drawn) for t in true]
    proof, (kl, flips, tokens) = compared(true, patched), slowly(true, patched)
    assert proof.kl == pytest.approx(kl, abs=1e-5)
    assert (proof.flips, proof.tokens, proof.questions) == (flips, tokens, len(lengths))


def test_a_large_vocabulary_is_compared_in_parts():
    true = [torch.randn(9, 3_000_000, generator=torch.Generator().manual_seed(0))]
    other = [t.clone() for t in true]
    other[0][8, 5] += 30.0
    proof = compared(true, other)
    assert proof.tokens == 9 and proof.flips == 1 and proof.kl > 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_proves_nothing(bad):
    true = [torch.zeros(3, 4)]
    broken = [torch.zeros(3, 4)]
    broken[0][1, 2] = bad
    assert not compared(true, broken).within(1e9)


def test_nothing_asked_proves_nothing():
    assert not compared([], []).within(1.0)
    assert not Proof(0.0, 0, 0, 0).within(1.0)


def test_one_flip_refuses_however_small_the_divergence():
    assert Proof(0.01, 0, 1, 5).within(0.05)
    assert not Proof(0.01, 1, 1, 5).within(0.05)
    assert not Proof(0.06, 0, 1, 5).within(0.05)
