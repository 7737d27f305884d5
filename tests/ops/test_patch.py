"""Patches: best low-rank factors, in the canonical frame, turning with their chunk."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import (
    LowRank,
    Patch,
    RopeSpec,
    apply_patch,
    attention_layout,
    deficit,
    factor,
    form_patch,
    kv_copy,
    kv_map,
    kv_of,
    mean_deficit,
    mla_latent_layout,
    patch_of,
    relocate,
    relocate_kv,
    rotate_factors,
)
from tests.ops.test_layout import span

MROPE = RopeSpec((1.0, 0.3, 0.1, 0.03), (0, 1, 2, 0), 3, "interleaved")
LAYOUT = [
    attention_layout(2, 4, 12, 10, MROPE),
    mla_latent_layout(24, MROPE, (1, 16, RopeSpec(MROPE.inv_freq, MROPE.axes, 3, "half"))),
]
SHAPES = [(6, 30), (30, 6), (8, 8), (1, 12), (12, 1)]


def matrix(tokens: int, features: int, seed: int = 0) -> torch.Tensor:
    """Dense, with a spectrum that falls like a deficit's does."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(tokens, features, dtype=torch.float64, generator=generator)
    u, s, vh = torch.linalg.svd(wide, full_matrices=False)
    return u * (s * 0.5 ** torch.arange(len(s))) @ vh


def pair(dtype: torch.dtype = torch.float64):
    """A canonical, and the conditioned copy that stands at `offset` from it."""
    offset = (40, 3, -7)
    canonical = span(*LAYOUT, tokens=9, dtype=dtype)
    absorbed = span(*LAYOUT, tokens=9, seed=1, dtype=dtype)
    at_home = kv_of(
        [{n: canonical[i][n] + 0.1 * absorbed[i][n] for n in canonical[i]} for i in range(len(LAYOUT))],
        canonical.groups,
    )
    return canonical, at_home, relocate_kv(at_home, LAYOUT, offset), offset


def assert_same(got, want, **tolerance):
    for mine, theirs in zip(got, want, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], **tolerance)


@pytest.mark.parametrize(("tokens", "features"), SHAPES)
def test_factors_are_the_best_of_their_rank(tokens, features):
    delta = matrix(tokens, features)
    singular = torch.linalg.svdvals(delta)
    for rank in range(1, min(tokens, features) + 1):
        low = factor(delta, rank)
        assert low.rank == rank
        error = (delta - low.dense()).square().sum()
        torch.testing.assert_close(error, singular[rank:].square().sum(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("tokens", "features"), SHAPES)
def test_all_ranks_reproduce_the_deficit(tokens, features):
    delta = matrix(tokens, features)
    torch.testing.assert_close(factor(delta).dense(), delta, rtol=0, atol=1e-12)


def test_a_truncation_is_a_prefix_and_the_best_of_its_rank():
    delta = matrix(10, 20)
    full = factor(delta)
    for rank in (0, 1, 4, 10, 99):
        cut = full.truncate(rank)
        assert torch.equal(cut.left, full.left[:, :rank])
        assert torch.equal(cut.right, full.right[:, :rank])
        torch.testing.assert_close(cut.dense(), factor(delta, rank).dense(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("tokens", "features"), [(4, 9), (9, 4), (0, 5), (5, 0)])
def test_no_deficit_has_rank_zero(tokens, features):
    low = factor(torch.zeros(tokens, features))
    assert low.rank == 0
    assert low.dense().shape == (tokens, features)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 12), st.integers(0, 1000))
def test_no_factorisation_is_worse_than_the_truncated_svd(tokens, features, rank, seed):
    delta = torch.randn(tokens, features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    low = factor(delta, rank)
    assert low.rank <= min(rank, tokens, features)
    best = torch.linalg.svdvals(delta)[rank:].square().sum().sqrt()
    assert float((delta - low.dense()).norm()) <= float(best) + 1e-7 * float(delta.norm())


def test_the_deficit_lies_in_the_canonical_frame():
    canonical, at_home, moved, offset = pair()
    deltas = deficit(moved, canonical, LAYOUT, offset)
    for i, layer in enumerate(deltas):
        for name, delta in layer.items():
            want = at_home[i][name] - canonical[i][name]
            for head in range(want.shape[0]):
                dim = want.shape[2]
                got = delta[:, head * dim : (head + 1) * dim]
                torch.testing.assert_close(got, want[head], rtol=0, atol=1e-12)


def test_the_deficit_of_half_precision_kv_is_not_rounded_to_it():
    canonical, _, moved, offset = pair(torch.bfloat16)
    wide = kv_map(moved, torch.Tensor.float)
    for layer, want in zip(
        deficit(moved, canonical, LAYOUT, offset),
        deficit(wide, kv_map(canonical, torch.Tensor.float), LAYOUT, offset),
        strict=True,
    ):
        for name, delta in layer.items():
            assert delta.dtype == torch.float32
            assert torch.equal(delta, want[name])


@pytest.mark.parametrize("onward", [(0, 0, 0), (40, 3, -7), (1000, 0, 0), (-3, 500, 9)])
def test_a_full_patch_serves_the_conditioned_kv_at_any_position(onward):
    canonical, at_home, moved, offset = pair()
    formed = form_patch(moved, canonical, LAYOUT, offset)
    assert formed.energy == pytest.approx(1.0)
    served = apply_patch(canonical, formed.patch, LAYOUT, onward)
    assert_same(served, relocate_kv(at_home, LAYOUT, onward), rtol=0, atol=1e-11)


@given(st.tuples(*[st.integers(-2000, 2000)] * 3), st.integers(1, 5))
def test_the_right_factor_alone_turns(offset, rank):
    channel = LAYOUT[0].channel("k")
    low = factor(matrix(7, channel.features), rank)
    turned = rotate_factors(low, channel, offset)
    dense = low.dense().reshape(7, channel.heads, channel.dim).transpose(0, 1)
    want = relocate(dense, MROPE, offset).transpose(0, 1).flatten(1)
    assert turned.left is low.left
    torch.testing.assert_close(turned.dense(), want, rtol=0, atol=1e-11)


def test_serving_leaves_the_canonical_as_it_was():
    canonical, _, moved, offset = pair()
    before = kv_copy(canonical)
    patch = form_patch(moved, canonical, LAYOUT, offset).patch
    apply_patch(canonical, patch, LAYOUT, offset)
    assert_same(canonical, before, rtol=0, atol=0)


def test_energy_is_the_share_of_the_deficit_in_the_factors():
    deltas = kv_of([{"k": matrix(6, 12), "v": matrix(6, 9, seed=1)}, {"k": torch.zeros(6, 12)}])
    for rank in (1, 2, 6, None):
        formed = patch_of(deltas, rank, torch.float64)
        total = sum(d.square().sum() for layer in deltas for d in layer.values())
        lost = sum((d - factor(d, rank).dense()).square().sum() for layer in deltas for d in layer.values())
        assert formed.energy == pytest.approx(1 - float(lost / total), abs=1e-9)
        assert "k" not in formed.patch.layers[1]
    assert patch_of(deltas, 1, torch.float64).energy < 0.9


def test_the_orbit_mean_is_the_mean_over_orderings():
    orderings = [kv_of([{"k": matrix(4, 6, seed=s)}]) for s in range(6)]
    for permuted in itertools.islice(itertools.permutations(orderings), 0, 720, 97):
        (mean,) = mean_deficit(permuted)
        want = sum(layers[0]["k"] for layers in orderings) / 6
        torch.testing.assert_close(mean["k"], want, rtol=0, atol=1e-12)
    untouched = orderings[0][0]["k"].clone()
    mean_deficit(iter(orderings))
    assert torch.equal(orderings[0][0]["k"], untouched)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LowRank(torch.zeros(3), torch.zeros(3, 1)), "must be matrices"),
        (lambda: LowRank(torch.zeros(3, 2), torch.zeros(4, 1)), "rank 2 and right 1"),
        (lambda: factor(torch.zeros(3)), r"\[tokens, features\], got \(3,\)"),
        (lambda: factor(torch.zeros(3, 3), -1), "rank -1 is negative"),
        (lambda: factor(torch.ones(3, 3)).truncate(-2), "rank -2 is negative"),
        (lambda: mean_deficit([]), "at least one ordering"),
        (lambda: serve(Patch.of(({},))), "patch of 1 layers, layout of 2"),
        (lambda: serve(Patch.of(({"x": factor(torch.ones(5, 5))}, {}))), r"channels \['x'\]"),
        (lambda: serve(Patch.of(({"k": factor(torch.ones(4, 24))}, {}))), "does not fit channel k"),
        (lambda: serve(Patch.of(({"k": factor(torch.ones(5, 23))}, {}))), "does not fit channel k"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def serve(patch: Patch):
    return apply_patch(span(*LAYOUT, tokens=5), patch, LAYOUT, (1, 1, 1))
