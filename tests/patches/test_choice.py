"""What a catalogue finds: rows of one context, once an operation, and the nearest patch of others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kamera.errors import StoreError
from kamera.ops import PatchBudget
from kamera.patches import Catalogue, Losses
from kamera.patches.near import disorder, divergence
from kamera.store import ChunkStore, Context, canonical_key, patch_key, survivor_id
from tests.store.builders import CHUNK, CONTEXT, canonical, patch

ELSEWHERE = replace(CONTEXT, anchor="b" * 64)


@pytest.fixture
def store():
    with ChunkStore.open("memory://") as opened:
        yield opened


@pytest.fixture
def catalogue(store) -> Catalogue:
    return Catalogue(store, CONTEXT, None, Losses())


# -- canonicals --------------------------------------------------------------------------------


def test_a_canonical_is_found_in_its_own_context(store, catalogue):
    assert not catalogue.has_canonical(CHUNK)
    store.put(canonical(context=ELSEWHERE))
    assert catalogue.canonical(CHUNK) is None
    store.put(canonical())
    assert catalogue.canonical(CHUNK).context == CONTEXT and catalogue.has_canonical(CHUNK)


def test_a_base_is_of_the_same_model_tenant_and_form_behind_another_anchor(store, catalogue):
    for other in (
        replace(ELSEWHERE, fingerprint="0" * 64),
        replace(ELSEWHERE, kv="int8"),
    ):
        store.put(canonical(context=other, kv=({}, {})) if other.kv != "as-is" else canonical(context=other))
    store.put(canonical())
    assert catalogue.base(CHUNK) is None and catalogue.is_archived(CHUNK)
    store.put(canonical(context=ELSEWHERE))
    assert catalogue.base(CHUNK).context == ELSEWHERE
    with catalogue.operation():
        catalogue.mark_base_missing(CHUNK)
        assert catalogue.base(CHUNK) is None
    assert catalogue.base(CHUNK) is not None


def test_a_chunk_that_was_read_counts_as_stored_for_the_operation(catalogue):
    with catalogue.operation():
        catalogue.mark_read(CHUNK)
        assert catalogue.has_canonical(CHUNK) and catalogue.canonical(CHUNK) is None
    assert not catalogue.has_canonical(CHUNK)


# -- one look-up an operation ------------------------------------------------------------------


def test_inside_an_operation_what_was_seen_stays_seen(store, catalogue):
    with catalogue.operation():
        assert catalogue.canonical(CHUNK) is None
        store.put(canonical())
        with catalogue.operation():
            assert catalogue.canonical(CHUNK) is None, "an inner one is part of it"
        catalogue.forget(canonical_key(CONTEXT, CHUNK))
        assert catalogue.canonical(CHUNK) is not None
    with catalogue.operation():
        assert catalogue.canonical(CHUNK) is not None


def test_outside_of_one_nothing_is_remembered(store, catalogue):
    assert catalogue.canonical(CHUNK) is None
    catalogue.mark_wrong(canonical_key(CONTEXT, CHUNK))
    catalogue.mark_read(CHUNK)
    store.put(canonical())
    assert catalogue.canonical(CHUNK) is not None


def test_a_refused_patch_is_absent_until_the_operation_ends(store, catalogue):
    store.put(patch())
    with catalogue.operation():
        assert catalogue.patch(CHUNK, ["x", "y"], "exact") is not None
        catalogue.mark_wrong(patch_key(CONTEXT, CHUNK, ["x", "y"], "exact"))
        assert catalogue.has_refused(CHUNK, ["x", "y"], "exact")
        assert catalogue.patch(CHUNK, ["x", "y"], "exact") is None
        assert catalogue.patches_of(CHUNK) == []
        catalogue.forget(patch_key(CONTEXT, CHUNK, ["x", "y"], "exact"))
        assert catalogue.patch(CHUNK, ["x", "y"], "exact") is None, "a lie is not forgotten"
    assert catalogue.patch(CHUNK, ["x", "y"], "exact") is not None


def test_a_store_that_fails_is_a_miss_with_a_note(store, catalogue, monkeypatch):
    def fail(*given, **options):
        raise StoreError("locked, says the test")

    notes: list[str] = []
    for name in ("info", "ls"):
        monkeypatch.setattr(store, name, fail)
    with pytest.warns(match="goes on without its store"), catalogue.losses.note_in(notes):
        assert catalogue.canonical(CHUNK) is None and catalogue.base(CHUNK) is None
        assert catalogue.patch(CHUNK, ["x"], "exact") is None and catalogue.near(CHUNK, ["x"], 1.0) == []
    assert len(notes) == 3 and all("locked, says the test" in note for note in notes)


# -- patches -----------------------------------------------------------------------------------


def test_a_patch_does_within_the_budget_it_was_formed_under(store, catalogue):
    store.put(replace(patch(rank=2), info=PatchBudget(2).to_info()))
    found = {
        rank: catalogue.patch_within(CHUNK, 3, ["x", "y"], "exact", PatchBudget(rank)) for rank in (1, 2, 3)
    }
    assert [rank for rank, row in found.items() if row] == [1, 2]
    assert catalogue.patch_within(CHUNK, 2, ["x", "y"], "exact", PatchBudget(3)), (
        "as much as a chunk can have"
    )


def test_an_orbit_patch_is_of_a_set_and_another_kind(store, catalogue):
    store.put(patch(kind="orbit"))
    assert catalogue.patch(CHUNK, ["y", "x"], "orbit") == catalogue.patch(CHUNK, ["x", "y"], "orbit")
    assert catalogue.patch(CHUNK, ["x", "y"], "exact") is None


def test_patches_of_a_chunk_are_those_that_stand_on_its_own_canonical(store, catalogue):
    store.put(patch(antecedents=("x",)))
    store.put(patch(antecedents=("x", "y"), kind="orbit"))
    store.put(replace(patch(antecedents=("y",)), base="b" * 64))
    store.put(patch(antecedents=(survivor_id("x", "l" * 32),)))
    store.put(patch(context=Context("0" * 64, "a" * 64)))
    store.put(patch(chunk="d" * 64))
    found = {(row.kind, row.antecedents) for row in catalogue.patches_of(CHUNK)}
    assert found == {("exact", ("x",)), ("orbit", ("x", "y"))}


# -- near --------------------------------------------------------------------------------------


def test_near_patches_come_nearest_first_and_within_the_limit(store, catalogue):
    for antecedents in (("p", "q"), ("x", "q"), ("x", "y", "z"), ("y", "x")):
        store.put(patch(antecedents=antecedents))
    near = catalogue.near(CHUNK, ["x", "y"], 0.7)
    assert [(round(n.divergence, 2), n.patch.antecedents) for n in near] == [
        (0.33, ("x", "y", "z")),
        (0.0, ("y", "x")),  # the whole set, in the reverse order: half of what it has in common
        (0.67, ("x", "q")),
    ]
    assert len(catalogue.near(CHUNK, ["x", "y"], 1.0)) == 4


def test_of_equally_near_patches_the_latest_comes_first(store, catalogue, monkeypatch):
    for when, antecedents in ((1.0, ("x", "p")), (2.0, ("x", "q"))):
        monkeypatch.setattr("kamera.store.tiers.time.time", lambda when=when: when)
        store.put(patch(antecedents=antecedents))
    assert [n.patch.antecedents for n in catalogue.near(CHUNK, ["x", "y"], 1.0)] == [("x", "q"), ("x", "p")]


@pytest.mark.parametrize(
    ("these", "those", "apart", "turned"),
    [
        ("", "", 0.0, 0.0),
        ("ab", "ab", 0.0, 0.0),
        ("ab", "ba", 0.0, 1.0),
        ("ab", "cd", 1.0, 0.0),
        ("abc", "abd", 0.5, 0.0),
        ("aab", "ab", 1 / 3, 0.0),
        ("abc", "acb", 0.0, 1 / 3),
    ],
)
def test_two_contexts_differ_in_their_sets_and_in_their_order(these, those, apart, turned):
    assert divergence(these, those) == pytest.approx(apart)
    assert disorder(these, those) == pytest.approx(turned)


def test_chunks_that_look_alike_count_as_partly_common_one_for_one():
    alike = {("b", "c"): 0.9, ("b", "d"): 0.5, ("a", "c"): 0.8}
    likeness = lambda one, other: alike.get((one, other), 0.0)  # noqa: E731
    assert divergence("ab", "c", likeness) == pytest.approx(1 - 0.9 / 2.1)
    # the most alike pair first: b with c, which leaves a without one
    assert divergence("ab", "cd", likeness) == pytest.approx(1 - 0.9 / 3.1)
