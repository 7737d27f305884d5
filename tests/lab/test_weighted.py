"""Patches weighted by readers: what is read least is left out first, and never a byte too many."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.ops import apply_patch, kv_bytes, kv_map, patch_of
from lab.weighted import Readers, compress, factor
from tests.ops.test_compress import deltas_of
from tests.ops.test_patch import LAYOUT, assert_same, matrix

pytestmark = pytest.mark.lab

SHAPES = [(6, 24), (24, 6), (8, 8)]


def moments(heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    """What could read a channel: full rank, of very unequal strength."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(heads, 3 * dim, dim, dtype=torch.float64, generator=generator)
    x = x * 3.0 ** -torch.arange(dim, dtype=torch.float64)
    return x.mT @ x / (3 * dim)


def readers_of(layout, seed: int = 0) -> Readers:
    layers = [
        {c.name: moments(c.heads, c.dim, seed + i + len(c.name)) for c in spec.channels}
        for i, spec in enumerate(layout)
    ]
    return Readers(tuple(layers))


def alone(moment: torch.Tensor):
    return Readers(({"v": moment},)).metric(0, "v")


def seen(error: torch.Tensor, metric) -> float:
    return float(metric.apply(error.double()).norm())


def left_of(deltas, patch, readers) -> float:
    """What readers see of what the patch does not bring back."""
    lost = 0.0
    for i, layer in enumerate(deltas):
        for name, delta in layer.items():
            error = delta.double()
            if patch is not None and name in patch.layers[i]:
                error = error - patch.layers[i][name].dense().double()
            lost += seen(error, readers.metric(i, name)) ** 2
    return lost


@pytest.mark.parametrize(("tokens", "features"), SHAPES)
def test_a_metric_undoes_itself_and_is_the_root_of_the_moment(tokens, features):
    moment = moments(2, features // 2)
    metric = alone(moment)
    x = matrix(tokens, features)
    torch.testing.assert_close(metric.undo(metric.apply(x)), x, rtol=0, atol=1e-9)
    damping = 1e-2 + 1e-4  # of the mean, as long as there is one channel
    floor = damping * moment.diagonal(dim1=1, dim2=2).mean() * torch.eye(features // 2).double()
    torch.testing.assert_close(metric.root @ metric.root, moment + floor, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("tokens", "features"), SHAPES)
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_readers_that_read_all_alike_give_the_plain_svd(tokens, features, scale):
    delta = matrix(tokens, features)
    metric = alone(scale * torch.eye(features // 2, dtype=torch.float64).expand(2, -1, -1))
    for rank in (1, 3, None):
        got, want = factor(delta, rank, metric), factor(delta, rank, None)
        assert got.rank == want.rank
        torch.testing.assert_close(got.dense(), want.dense(), rtol=0, atol=1e-9)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 12), st.integers(0, 1000))
def test_the_weighted_residual_is_minimal_for_its_rank(tokens, dim, heads, rank, seed):
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(tokens, heads * dim, dtype=torch.float64, generator=generator)
    metric = alone(moments(heads, dim, seed))
    low, plain = factor(delta, rank, metric), factor(delta, rank, None)
    lost = seen(delta - low.dense(), metric)
    tolerance = 1e-6 * seen(delta, metric)
    assert lost <= seen(delta - plain.dense(), metric) + tolerance
    best = torch.linalg.svdvals(metric.apply(delta))[low.rank :].square().sum().sqrt()
    assert lost == pytest.approx(float(best), abs=tolerance)


def test_weighting_changes_what_is_kept():
    delta = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    metric = alone(torch.diag(torch.tensor([0.0, 0.0, 9.0], dtype=torch.float64))[None])
    assert factor(delta, 1, None).dense().abs().amax(0).argmax() == 0
    assert factor(delta, 1, metric).dense().abs().amax(0).argmax() == 2


def test_a_budget_for_all_is_a_full_patch():
    deltas, canonical, moved, offset = deltas_of()
    readers, budget = readers_of(LAYOUT), 10 * kv_bytes(canonical)
    formed = compress(deltas, LAYOUT, budget, readers, widths=(), dtype=torch.float64)
    assert formed.energy == pytest.approx(1.0, abs=1e-12)
    assert_same(apply_patch(canonical, formed.patch, LAYOUT, offset), moved, rtol=0, atol=1e-6)


@pytest.mark.parametrize("widths", [(), (8,), (4,), (8, 4)])
def test_no_budget_is_exceeded_and_more_bytes_are_never_worse(widths):
    deltas, *_ = deltas_of(torch.float32)
    readers, energies = readers_of(LAYOUT), []
    for budget in (0, 1, 60, 150, 400, 900, 3000, 10_000):
        formed = compress(deltas, LAYOUT, budget, readers, widths=widths)
        assert formed.patch.nbytes <= budget
        energies.append(left_of(deltas, formed.patch, readers))
    assert energies[0] == pytest.approx(left_of(deltas, None, readers))
    assert all(more <= less * (1 + 1e-2) for less, more in itertools.pairwise(energies))
    assert energies[-1] < (0.1 if widths == (4,) else 0.02) * energies[0]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_at_the_bytes_of_a_uniform_patch_less_is_left_behind(rank):
    deltas, *_ = deltas_of(torch.float32)
    readers, uniform = readers_of(LAYOUT), patch_of(deltas, rank, torch.float32).patch
    spread = compress(deltas, LAYOUT, uniform.nbytes, readers, widths=()).patch
    coded = compress(deltas, LAYOUT, uniform.nbytes, readers).patch
    assert left_of(deltas, spread, readers) <= left_of(deltas, uniform, readers) * (1 + 1e-9)
    assert left_of(deltas, coded, readers) < left_of(deltas, spread, readers)


def test_bytes_go_where_the_readers_are():
    deltas, *_ = deltas_of()
    reads = [{c.name: torch.zeros(c.heads, c.dim, c.dim) for c in spec.channels} for spec in LAYOUT]
    reads[0]["v"] += torch.eye(10)
    formed = compress(deltas, LAYOUT, 150, Readers(tuple(reads)))
    assert [set(layer) for layer in formed.patch.layers] == [{"v"}, set()]


def test_no_deficit_needs_no_bytes():
    formed = compress(kv_map(deltas_of()[0], torch.zeros_like), LAYOUT, 10_000, readers_of(LAYOUT))
    assert formed.patch.layers == ({}, {})
    assert formed.energy == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, r: compress(d, LAYOUT, 9, Readers(r.layers[:1])), "readers of 1 layers"),
        (
            lambda d, r: compress(d, LAYOUT, 9, Readers((r.layers[0], {}))),
            "channel c_kv: readers None",
        ),
        (
            lambda d, r: compress(
                d, LAYOUT, 9, Readers(({**r.layers[0], "v": torch.zeros(1, 20, 20)}, r.layers[1]))
            ),
            r"readers \(1, 20, 20\), expected \(2, 10, 10\)",
        ),
        (
            lambda d, r: compress(
                d, LAYOUT, 9, Readers(({**r.layers[0], "v": r.layers[0]["v"] / 0}, r.layers[1]))
            ),
            "not finite",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    deltas, *_ = deltas_of()
    with pytest.raises(ValueError, match=message):
        change(deltas, readers_of(LAYOUT))
