"""Proofs held against the definition, one token at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import kv_copy, kv_map, kv_of
from kamera.trust import Proof, compare, kv_error, sketch
from kamera.trust.proof import DECIDED, KV_BOUND, LEAST_KINDS, NEAR_EXACT

KINDS = tuple(sketch(range(10 * i, 10 * i + 8)) for i in range(LEAST_KINDS))
"""Questions unlike each other, as many as a proof needs."""

GOOD = Proof(0.01, 0, 5, (NEAR_EXACT + KV_BOUND) / 2, KINDS)


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
    proof = compare(true, patched, KINDS[:1] * len(lengths), 0.1)
    kl, flips, tokens = slowly(true, patched)
    assert proof.kl == pytest.approx(kl, abs=1e-5)
    assert (proof.flips, proof.tokens, proof.questions) == (flips, tokens, len(lengths))


def test_a_large_vocabulary_is_compared_in_parts():
    true = [torch.randn(9, 3_000_000, generator=torch.Generator().manual_seed(0))]
    other = [t.clone() for t in true]
    other[0][8, 5] += 30.0
    proof = compare(true, other, KINDS[:1], 0.0)
    assert proof.tokens == 9 and proof.flips == 1 and proof.kl > 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_proves_nothing(bad):
    true = [torch.zeros(3, 4)]
    broken = [torch.zeros(3, 4)]
    broken[0][1, 2] = bad
    assert not compare(true, broken, KINDS, 0.0).holds_at(1e9)


def test_nothing_asked_proves_nothing():
    assert not compare([], [], (), 0.0).holds_at(1.0)
    assert not replace(GOOD, tokens=0, kv=0.0).holds_at(1.0)


def test_one_flip_refuses_however_small_the_divergence():
    assert GOOD.holds_at(0.05)
    assert not replace(GOOD, flips=1).holds_at(0.05)
    assert not replace(GOOD, kl=0.06).holds_at(0.05)


def test_kv_that_is_far_off_refuses_whatever_was_answered():
    assert replace(GOOD, kl=0.0, kv=KV_BOUND).holds_at(0.05)
    assert not replace(GOOD, kl=0.0, kv=KV_BOUND + 1e-6).holds_at(0.05)
    assert not replace(GOOD, kl=0.0, kv=float("nan")).holds_at(0.05)


def test_few_kinds_of_questions_prove_near_exact_kv_only():
    alike = sketch(range(1, 9))  # seven of nine tokens are those of the first
    few = replace(GOOD, asked=(*KINDS[:-1], alike))
    assert (few.questions, few.kinds) == (LEAST_KINDS, LEAST_KINDS - 1)
    assert not few.holds_at(0.05)
    assert few.undecided
    assert replace(few, kv=NEAR_EXACT).holds_at(0.05)
    assert not replace(few, flips=1).undecided
    assert not replace(few, kv=KV_BOUND + 1e-6).undecided


def test_a_proof_covers_questions_like_those_it_asked():
    assert GOOD.covers(sketch([2, 3, 4, 5, 6, 7, 99]))
    assert not GOOD.covers(sketch(range(70, 78)))
    assert replace(GOOD, kv=NEAR_EXACT).covers(sketch(range(70, 78)))


# -- the error of KV -------------------------------------------------------------------------------


def drawn(seed: int, tokens: int = 6) -> dict[str, torch.Tensor]:
    """KV of one layer with two channels, ``[heads, tokens, dim]``."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(2, tokens, 3, generator=generator) for name in ("k", "v")}


def rows(layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.transpose(0, 1).reshape(x.shape[1], -1) for name, x in layer.items()}


def less(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one[name] - other[name] for name in one}


def test_the_error_of_kv_is_that_of_the_worst_token_of_the_worst_channel():
    true, blind = kv_of([drawn(1), drawn(2)]), kv_of([drawn(3), drawn(4)])
    deltas = kv_of([rows(less(t, b)) for t, b in zip(true, blind, strict=True)])
    assert kv_error(true, true, deltas) == 0.0
    assert kv_error(true, blind, deltas) >= 1.0
    served = kv_copy(true)
    served[1]["v"][:, 4] = blind[1]["v"][:, 4]  # one token of one channel was left blind
    lost = deltas[1]["v"]
    assert kv_error(true, served, deltas) == pytest.approx(
        float(lost[4].norm() / lost.norm() * len(lost) ** 0.5), rel=1e-5
    )


def test_what_nothing_was_absorbed_in_is_measured_by_its_own_spread():
    true = kv_of([drawn(1)])
    nothing = kv_of([{name: torch.zeros_like(x) for name, x in rows(true[0]).items()}])
    near = kv_map(true, lambda x: x * (1 + 1e-3))
    assert 0.0 < kv_error(true, near, nothing) < 0.1
    assert kv_error(true, kv_of([drawn(5)]), nothing) > 1.0
    near[0]["k"][0, 0, 0] = float("nan")
    assert not replace(GOOD, kv=kv_error(true, near, nothing)).holds_at(1e9)
