"""Patches of sets, and terms of composed patches: what is formed, by which forwards, and what is served."""

from __future__ import annotations

import itertools

import pytest
import torch

from kamera.ops import apply_patch, deficit, mean_deficit, triples_of
from kamera.patches import FORMED_TERM, Losses, composed, form_orbit, form_pairs
from kamera.store import ChunkStore
from tests.engines.compare import relative, worst
from tests.patches.engine import (
    LAYOUT,
    behind_all,
    conditioned,
    former_of,
    nothing_before,
    text,
)

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
    every = [conditioned(former, *order, T).kv for order in itertools.permutations([A, B, C])]
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


# -- terms -------------------------------------------------------------------------------------


def test_terms_are_the_singles_and_ordered_pairs_and_formed_once(engine, former):
    assert form_pairs(former, [T], [A, B, C]) == (3 + 6, 0)
    behind = {row.antecedents for row in rows(former)}
    names = [A.chunk_id, B.chunk_id, C.chunk_id]
    assert behind == {order for n in (1, 2) for order in itertools.permutations(names, n)}
    assert {row.formed for row in rows(former)} == {FORMED_TERM}
    with engine.measure() as work:
        assert form_pairs(former, [T], [A, B, C]) == (0, 9)
    assert work.forwards == 0


@pytest.mark.parametrize(("triples", "more"), [("standing", 1), ("all", 6)])
def test_triples_are_those_that_stand_or_those_of_every_order(former, triples, more):
    assert form_pairs(former, [T], [A, B, C], triples=triples) == (9 + more, 0)
    standing = (A.chunk_id, B.chunk_id, C.chunk_id)
    assert standing in {row.antecedents for row in rows(former)}


def test_a_term_makes_what_the_target_is_behind_these_chunks(engine, former):
    form_pairs(former, [T], [A, B])
    patch = former.patch(T, [B.chunk_id, A.chunk_id], "exact", FORMED_TERM)
    got = apply_patch(former.canonical(T).kv, patch, LAYOUT, [A.length + B.length])
    assert worst(got, behind_all(engine, B, A, T)) <= 1e-5


def test_targets_share_the_forwards_of_what_stands_before_them(engine, former):
    for facts in (A, B, T):
        former.canonical(facts)
    with engine.measure() as work:
        form_pairs(former, [T, A], [A, B])
    # T behind A, B, AB, BA and A behind B, which is what T stands behind in BA; and B behind A in AB
    assert work.forwards == 4 + 1 + 1
    assert len(rows(former)) == 5


def test_a_term_behind_weaker_kv_is_formed_again(former):
    former.keep_patch(T, conditioned(former, A, T), "survivor", nothing_before(former))
    assert form_pairs(former, [T], [A]) == (1, 0)
    assert [row.formed for row in rows(former)] == [FORMED_TERM]


def test_other_triples_are_refused(former):
    with pytest.raises(ValueError, match="triples 'some': give 'standing', 'all' or None"):
        form_pairs(former, [T], [A, B], triples="some")


# -- composed ----------------------------------------------------------------------------------


def composed_kv(former, order, **options):
    patch = composed(former, T, [x.chunk_id for x in order], **({"max_doubt": 10.0} | options))
    place = [sum(x.length for x in order)]
    return None if patch is None else apply_patch(former.canonical(T).kv, patch, LAYOUT, place)


def test_a_composed_patch_is_nearer_than_none_and_runs_no_forward(engine, former):
    form_pairs(former, [T], [A, B, C])
    with engine.measure() as work:
        got = composed_kv(former, [C, A, B])
    assert work.forwards == 0
    want = behind_all(engine, C, A, B, T)
    blind = apply_patch(former.canonical(T).kv, None, LAYOUT, [18])
    assert worst(got, want) < worst(blind, want)
    assert len(rows(former)) == 9, "nothing is stored"


def test_triples_of_the_order_bring_a_composed_patch_nearer(engine, former):
    order = (C, A, text(5), B)
    form_pairs(former, [T], order, triples="standing")
    got = composed_kv(former, order, triples=triples_of([x.chunk_id for x in order]))
    plain = composed_kv(former, order)
    want = behind_all(engine, *order, T)
    assert worst(got, want) < worst(plain, want)


def test_a_term_that_is_missing_or_doubted_composes_nothing(former):
    notes: list[str] = []
    form_pairs(former, [T], [A, B, C])
    with former.losses.told_to(notes), former.operation():
        assert composed_kv(former, [A, B, C], max_doubt=0.0) is None
        assert former.catalogue.doubted(T.chunk_id, [x.chunk_id for x in (A, B, C)])
        assert not former.catalogue.doubted(T.chunk_id, [x.chunk_id for x in (B, A, C)])
    assert "contradict each other" in notes[0]
    assert composed_kv(former, [A, B, text(9)]) is None


def test_the_orders_are_drawn_from_their_seed(former):
    four = [A, B, C, text(5)]
    first, same, other = (
        form_orbit(former, T, four, samples=9, seed=seed).patch.layers[1] for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name].dense(), same[name].dense()) for name in "kv")
    assert not any(torch.equal(first[name].dense(), other[name].dense()) for name in "kv")
