"""Strongest directions: as good as the SVD's, whichever way they were found, and the same every time."""

from __future__ import annotations

import pytest
import torch

import kamera.ops.svd as spectrum
from kamera.ops import kept_energy, kv_of, patch_of
from kamera.ops.svd import strongest_directions
from tests.ops.coded import coded


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


@pytest.mark.few(5)
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


def test_what_a_sketch_cannot_vouch_for_goes_the_exact_way(ways):
    """Noise has no few strongest directions: passes over it never settle."""
    noise = torch.randn(2, 220, 200, generator=torch.Generator().manual_seed(1)) * 30
    x = torch.cat((matrices(220, 200, 0.8, n=2), noise))
    found = strongest_directions(x, 16)
    assert ways == {"sketch": 4, "exact": 2}
    torch.testing.assert_close(kept(x, found), best(x, 16), rtol=1e-5, atol=0)


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


def test_the_same_deficit_has_the_same_factors_bit_for_bit():
    x = matrices(260, 200, 0.9)
    torch.manual_seed(1)
    first = strongest_directions(x, 12)
    torch.manual_seed(2)
    second = strongest_directions(x.clone(), 12)
    assert torch.equal(first.left, second.left) and torch.equal(first.right, second.right)


# -- the energy factors leave out ----------------------------------------------------------------------


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
