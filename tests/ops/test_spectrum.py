"""Strongest directions: as good as the SVD's, whichever way they were found, and the same every time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kamera.ops.spectrum as spectrum
from kamera.ops import factor, kept_energy, kv_of, patch_of
from kamera.ops.factoring import residuals, stacks
from kamera.ops.spectrum import strongest_directions
from lab.coded import coded


def matrices(tokens: int, features: int, fall: float, *, n: int = 3, seed: int = 0, dtype=torch.float32):
    """``n`` dense matrices whose singular values fall by ``fall``, each at a size of its own."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(n, tokens, features, dtype=torch.float64, generator=generator)
    u, _, vh = torch.linalg.svd(wide, full_matrices=False)
    s = fall ** torch.arange(u.shape[2], dtype=torch.float64)
    sizes = 10.0 ** torch.arange(n)
    return ((u * s @ vh) * sizes[:, None, None]).to(dtype)


def best(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Energy that the SVD keeps of each matrix, ``[n]``."""
    return torch.linalg.svdvals(x.double())[:, :rank].square().sum(1)


def kept(x: torch.Tensor, found) -> torch.Tensor:
    """Energy that factors keep, from the dense difference, ``[n]``."""
    rest = x.double() - found.left.double() @ found.right.double().mT
    return x.double().square().sum((1, 2)) - rest.square().sum((1, 2))


@pytest.fixture
def ways(monkeypatch):
    """How many matrices went each way."""
    count = {"sketch": 0, "exact": 0}

    def watch(name: str) -> None:
        way = getattr(spectrum, f"_{name}")

        def counting(x, *args):
            count[name] += x.shape[0]
            return way(x, *args)

        monkeypatch.setattr(spectrum, f"_{name}", counting)

    for name in count:
        watch(name)
    return count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "features"), [(300, 160), (160, 300), (256, 256)])
@pytest.mark.parametrize("fall", [0.5, 0.9, 0.97])
def test_a_sketch_keeps_the_energy_that_the_svd_keeps(tokens, features, fall, dtype, ways):
    x = matrices(tokens, features, fall, dtype=dtype)
    for rank in (1, 8, 20):
        found = strongest_directions(x, rank)
        assert bool((kept(x, found) >= best(x, rank) * (1 - 1e-4)).all())
        torch.testing.assert_close(
            found.values.square().sum(1), kept(x, found), rtol=1e-5, atol=0, msg="values are the energies"
        )
    assert ways["sketch"] == 9


@pytest.mark.parametrize("fall", [0.9, 0.95])
def test_both_methods_give_orthogonal_evenly_split_columns(fall, ways):
    x = matrices(200, 180, fall)
    for rank in (10, None):
        found = strongest_directions(x, rank)
        for side in (found.left, found.right):
            gram = side.double().mT @ side.double()
            want = torch.diag_embed(found.values)
            size = found.values[:, :1, None]
            assert float(((gram - want) / size).abs().max()) < 2e-5
        assert bool((found.values.diff(dim=1) <= 0).all())
    assert ways == {"sketch": 3, "exact": 3}


def test_what_a_sketch_cannot_vouch_for_goes_the_exact_way(ways):
    """Noise has no few strongest directions: passes over it never settle."""
    noise = torch.randn(2, 220, 200, generator=torch.Generator().manual_seed(1)) * 30
    x = torch.cat((matrices(220, 200, 0.8, n=2), noise))
    found = strongest_directions(x, 16)
    assert ways == {"sketch": 4, "exact": 2}
    torch.testing.assert_close(kept(x, found), best(x, 16), rtol=1e-5, atol=0)


@settings(max_examples=40)
@given(
    st.sampled_from([(130, 90), (90, 140)]),
    st.integers(1, 6),
    st.lists(st.floats(0.0, 1.0), min_size=90, max_size=90),
    st.integers(0, 1000),
)
def test_whatever_the_spectrum_the_energy_is_that_of_the_svd(shape, rank, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(
        torch.randn(shape, dtype=torch.float64, generator=generator), full_matrices=False
    )
    x = (u * torch.tensor(steps, dtype=torch.float64).cumprod(0) @ vh)[None]
    found = strongest_directions(x.float(), rank)
    assert float(kept(x, found)) >= float(best(x, rank)) * (1 - 1e-4) - 1e-12


def test_rounding_beside_a_signal_is_not_worth_the_exact_way(ways):
    """Keys of the first layer differ by rounding only; noise as it is, it must not cost an eigensolver."""
    x = matrices(220, 200, 0.8, n=3)
    x[0] = 1e-8 * torch.randn(220, 200, generator=torch.Generator().manual_seed(2))
    found = strongest_directions(x, 16)
    assert ways == {"sketch": 3, "exact": 0}
    assert found.counts == [16, 16, 16]


@pytest.mark.parametrize(("rank", "wanted"), [(8, 3), (2, 2), (None, 3)])
def test_directions_that_are_rounding_are_cut(rank, wanted):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 150, 3, dtype=torch.float64, generator=generator) @ torch.randn(
        2, 3, 140, dtype=torch.float64, generator=generator
    )
    found = strongest_directions(x, rank)
    assert found.counts == [wanted, wanted]
    assert not bool(found.left[:, :, wanted:].any() or found.right[:, :, wanted:].any())
    assert not bool(found.values[:, wanted:].any())


@pytest.mark.parametrize("rank", [0, 8, None])
def test_zeros_among_others_have_no_directions(rank):
    x = matrices(150, 140, 0.8)
    x[1] = 0.0
    found = strongest_directions(x, rank)
    assert found.counts[1] == 0
    assert bool(found.left.isfinite().all() and found.right.isfinite().all())
    assert (found.counts[0] > 0) is (rank != 0)


@pytest.mark.parametrize("tokens", [1, 5, 31])
def test_a_rank_above_what_the_tokens_span_gives_them_all(tokens):
    x = matrices(tokens, 300, 0.9)
    found = strongest_directions(x, 32)
    assert found.left.shape == (3, tokens, tokens)
    torch.testing.assert_close(found.left @ found.right.mT, x, rtol=0, atol=1e-4 * 100)


@pytest.mark.parametrize("scale", [1e-18, 1e-6, 1e6, 1e15])
def test_a_sketch_does_not_depend_on_scale(scale, ways):
    x = matrices(200, 150, 0.8)
    want, got = strongest_directions(x, 8), strongest_directions(x * scale, 8)
    assert want.counts == got.counts
    torch.testing.assert_close(got.values / scale, want.values, rtol=1e-4, atol=0)
    assert ways == {"sketch": 6, "exact": 0}


def test_the_same_deficit_has_the_same_factors_bit_for_bit():
    x = matrices(260, 200, 0.9)
    torch.manual_seed(1)
    first = strongest_directions(x, 12)
    torch.manual_seed(2)
    second = strongest_directions(x.clone(), 12)
    assert torch.equal(first.left, second.left) and torch.equal(first.right, second.right)


def test_a_full_rank_patch_of_float32_is_exact_to_rounding():
    deltas = kv_of([{"k": matrices(96, 80, 0.8, n=1)[0], "v": torch.randn(96, 80)}])
    formed = patch_of(deltas, None, torch.float32)
    for name, delta in deltas[0].items():
        error = (formed.patch.layers[0][name].dense() - delta).norm() / delta.norm()
        assert float(error) <= 2e-6
    assert formed.energy == pytest.approx(1.0, abs=1e-6)


# -- the energy factors leave out ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residuals_equal_those_of_the_dense_difference(dtype):
    x = matrices(60, 40, 0.7, dtype=dtype)
    found = strongest_directions(x, 6)
    # factors as they are stored, not as they were found
    left, right = found.left.to(torch.bfloat16), found.right.to(torch.bfloat16)
    residual = residuals(x, left, right)
    for k in range(7):
        rest = x.double() - left[:, :, :k].double() @ right[:, :, :k].double().mT
        want = rest.square().sum((1, 2))
        torch.testing.assert_close(residual[:, k], want, rtol=0, atol=1e-6 * float(residual[:, 0].max()))


def test_the_energy_of_any_patch_is_that_of_the_dense_difference():
    deltas = kv_of([{"k": matrices(60, 40, 0.7, n=1)[0]}, {"k": 3 * matrices(60, 40, 0.9, n=1)[0]}, {}])
    patch = patch_of(deltas, 5, torch.float32).patch
    other = patch_of(
        kv_of([{"k": torch.randn(60, 40)}, {}, {}]), 3, torch.float32
    ).patch  # does not even help
    total = sum(float(d.double().square().sum()) for layer in deltas for d in layer.values())
    for made in (patch, patch.truncate(2), coded(patch, 4), other.truncate(1)):
        lost = sum(
            float((d - made.layers[i][n].dense()).double().square().sum())
            if n in made.layers[i]
            else float(d.double().square().sum())
            for i, layer in enumerate(deltas)
            for n, d in layer.items()
        )
        assert kept_energy(deltas, made) == pytest.approx(max(0.0, 1 - lost / total), abs=1e-6)


def test_stacks_hold_every_channel_once_within_their_bytes(monkeypatch):
    deltas = kv_of(
        [{"k": torch.full((4, 6), float(i)), "v": torch.full((4, 3), -float(i))} for i in range(5)]
    )
    monkeypatch.setattr("kamera.ops.factoring.STACK_BYTES", 2 * 4 * 6 * 4)
    seen = {}
    for _, name, layers, x in stacks(deltas):
        assert x.nbytes <= 2 * 4 * 6 * 4
        seen |= {(layer, name): x[n] for n, layer in enumerate(layers)}
    assert len(seen) == 10
    assert all(torch.equal(x, deltas[i][name]) for (i, name), x in seen.items())


def test_one_matrix_is_factored_as_in_a_stack():
    x = matrices(200, 150, 0.8)
    whole = strongest_directions(x[1:2], 8)
    low = factor(x[1], 8)
    assert torch.equal(low.left, whole.left[0]) and torch.equal(low.right, whole.right[0])
