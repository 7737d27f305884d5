"""Patches of sets: what is formed, by which forwards, and what is served."""

from __future__ import annotations

import itertools

import pytest
import torch

from kamera.ops import deficit, mean_deficit
from kamera.patches import Losses, form_orbit
from kamera.store import ChunkStore
from tests.engines.compare import relative
from tests.patches.engine import LAYOUT, conditioned, former_of, text

A, B, C, T = text(1), text(2), text(3), text(4, tokens=8)


@pytest.fixture
def former(engine):
    with ChunkStore.open("memory://") as store:
        yield former_of(engine, store, losses=Losses())


def rows(former, kind: str = "exact"):
    return former.store.ls(kind)


def test_an_orbit_patch_is_the_mean_of_what_the_target_absorbs_in_every_order(former):
    formed = form_orbit(former, T, [A, B, C])
    canonical = former.canonical(T)
    offset = [A.length + B.length + C.length]
    every = [conditioned(former, *order, T)[0].kv for order in itertools.permutations([A, B, C])]
    mean = mean_deficit(deficit(kv, canonical.kv, LAYOUT, offset) for kv in every)
    assert max(mean[0][name].abs().max() for name in "kv") <= 1e-5, "the first layer absorbs nothing"
    for name, delta in mean[1].items():
        assert relative(formed.patch.layers[1][name].dense(), delta) <= 1e-5
    assert formed.energy == pytest.approx(1.0, abs=1e-5)


def test_an_orbit_patch_serves_the_set_and_says_of_how_many_orders(former):
    form_orbit(former, T, [A, B, C])
    (row,) = rows(former, "orbit")
    assert row.orderings == 6
    for order in ([A, B, C], [C, A, B]):
        assert former.catalogue.patch(T.chunk_id, [x.chunk_id for x in order], "orbit") == row
    assert former.catalogue.patch(T.chunk_id, [A.chunk_id, B.chunk_id], "orbit") is None


def test_an_orbit_patch_is_seen_in_the_operation_that_formed_it(former):
    with former.operation():
        assert former.catalogue.patch(T.chunk_id, [A.chunk_id], "orbit") is None
        form_orbit(former, T, [A])
        assert former.catalogue.patch(T.chunk_id, [A.chunk_id], "orbit") is not None


def test_an_orbit_runs_each_beginning_of_an_order_once(engine, former):
    with engine.measure() as work:
        form_orbit(former, T, [A, B])
    # canonicals of T, A and B; B behind A, A behind B; T behind both orders
    assert work.forwards == 7
    with engine.measure() as work:
        form_orbit(former, T, [A, B], samples=1)
    assert work.forwards == 2
    assert rows(former, "orbit")[0].orderings == 1


def test_an_orbit_needs_antecedents_and_orders(former):
    with pytest.raises(ValueError, match="a leading chunk absorbs nothing"):
        form_orbit(former, T, [])
    with pytest.raises(ValueError, match="samples 0 must be at least 1"):
        form_orbit(former, T, [A, B], samples=0)
    assert rows(former, "orbit") == []


def test_the_orders_are_drawn_from_their_seed(former):
    four = [A, B, C, text(5)]
    first, same, other = (
        form_orbit(former, T, four, samples=9, seed=seed).patch.layers[1] for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name].dense(), same[name].dense()) for name in "kv")
    assert not any(torch.equal(first[name].dense(), other[name].dense()) for name in "kv")
