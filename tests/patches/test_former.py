"""Patches of one context: which are formed and kept, and what they make of a canonical."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kamera.ops import PatchBudget, apply_patch
from kamera.patches import harvest, keep_patch
from tests.engines.compare import worst
from tests.patches.engine import (
    LAYOUT,
    behind_all,
    conditioned,
    former_of,
    text,
)

A, B, C = text(1), text(2), text(3, tokens=9)


def harvested(former, *chunks, formed="exact") -> None:
    """Harvest the patch of the last chunk behind the others."""
    copy, before = conditioned(former, *chunks)
    harvest(former, chunks[-1], copy, replace(before, formed=formed))


def served(former, facts, *antecedents, offset: int = 0):
    """The KV that a stored patch makes, ``offset`` positions behind the canonical's place."""
    patch = former.patch(facts, [a.chunk_id for a in antecedents], "exact", "exact")
    return apply_patch(former.canonical(facts).kv, patch, LAYOUT, [offset])


# -- the engine these tests stand on -----------------------------------------------------------


def test_the_small_engine_computes_chunk_by_chunk_what_it_computes_at_once(engine, former):
    kv = conditioned(former, A, B, C)[0].kv
    assert worst(kv, behind_all(engine, A, B, C)) <= 1e-5
    alone = behind_all(engine, C)
    assert worst(kv, apply_patch(alone, None, LAYOUT, [A.length + B.length])) > 0.1, "it absorbs a lot"


# -- patches -----------------------------------------------------------------------------------


def test_a_whole_patch_makes_the_conditioned_kv_at_its_place(engine, former):
    harvested(former, A, B, C)
    got = served(former, C, A, B, offset=A.length + B.length)
    assert worst(got, behind_all(engine, A, B, C)) <= 1e-5


def test_smaller_patches_are_worse_and_better_than_none(engine, store):
    errors = []
    for rank in (1, 2, 4, 9):
        former = former_of(engine, store, PatchBudget(rank))
        harvested(former, A, B, C)
        errors.append(worst(served(former, C, A, B, offset=12), behind_all(engine, A, B, C)))
    blind = worst(apply_patch(former.canonical(C).kv, None, LAYOUT, [12]), behind_all(engine, A, B, C))
    assert [*sorted(errors, reverse=True)] == errors and errors[0] < blind and errors[-1] <= 1e-5


@pytest.mark.parametrize("first", ["exact", "patched"])
def test_of_two_harvests_at_once_the_one_behind_stronger_kv_is_kept(engine, store, monkeypatch, first):
    formers = {worth: former_of(engine, store) for worth in ("exact", "patched")}
    for facts in (A, B):
        formers["exact"].canonical(facts)
    both, stored, put = threading.Barrier(2), threading.Event(), store.put_many

    def in_order(records):
        (record,) = records
        both.wait(60)
        assert record.formed == first or stored.wait(60)
        puts = put(records)
        stored.set()
        return puts

    monkeypatch.setattr(store, "put_many", in_order)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda worth: harvested(formers[worth], A, B, formed=worth), formers))
    (row,) = store.ls("exact")
    assert row.formed == "exact"


def test_a_patch_on_a_canonical_of_another_anchor_makes_the_kv_behind_this_one(engine, store, former):
    former.canonical(B)
    other = former_of(engine, store, system=[7, 8, 9, 10])
    base = other.catalogue.base(B.chunk_id)
    anchor = base.context.anchor
    assert anchor == former.context.anchor
    with engine.measure() as work:
        assert keep_patch(other, B, *conditioned(other, A, B), anchor)
    assert work.forwards == 2, "A and B behind it, and no canonical of B"
    patch = other.patch(B, [A.chunk_id], "exact", "exact", anchor)
    got = apply_patch(other.base_copy(B, anchor).kv, patch, LAYOUT, [4 + A.length - 3])
    assert worst(got, behind_all(engine, A, B, system=(7, 8, 9, 10))) <= 1e-5


# -- lines -------------------------------------------------------------------------------------
