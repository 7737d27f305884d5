"""Composed patches in windows: served from stored terms with no forward, refused by name, withheld."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kamera import Backbone, Chunk, ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import UncertifiedBackbone
from kamera.ops import apply_patch, compose, kv_of, patch_of, terms_of, triples_of
from kamera.window import Guarantee, Recall
from kamera.window.composed import TermRows, composed_offer
from tests.engines.compare import worst
from tests.window.certificates import ALL_SAFE, but, certificate
from tests.window.rig import FULL_RANK, guarantees, live, make, rig, watching
from tests.window.test_errors import damage
from tests.window.test_plan import POLICY, Fake, decided, everything, limits, new, standing, worths

COMPOSED = ReusePolicy(minimum="composed", rank=FULL_RANK, max_doubt=1.0, composed_up_to=6, forms="always")
ORDER = [2, 0, 1, 3]
SERVED = ["exact", "patched", "patched", "composed"]


@functools.cache
def pieces() -> tuple[Backbone, list[Chunk]]:
    return rig("qwen2_5_vl", 4)


@functools.cache
def formed() -> ChunkStore:
    """Terms of four chunks, and the patches of their first order. Windows of `COMPOSED` add nothing to it."""
    return form("memory://")


def form(where: str | Path, count: int = 4) -> ChunkStore:
    """A store with the terms of that many chunks."""
    backbone, chunks = rig("qwen2_5_vl", count)
    store = ChunkStore.open(where)
    make(backbone, store, *chunks).form_pairs()
    return store


def opened(store: ChunkStore | None = None, policy: ReusePolicy = COMPOSED, **options) -> KameraWindow:
    """A window of the four chunks in the order they were formed in."""
    backbone, chunks = pieces()
    return make(backbone, store or formed(), *chunks, policy=policy, **options)


# -- serving ---------------------------------------------------------------------------------------


def test_an_order_nobody_formed_is_served_without_a_forward():
    window = opened()
    planned = window.plan_reorder(ORDER)
    with watching(window.backbone) as seen:
        report = window.reorder(ORDER)
    assert (seen.forwards, seen.encodes, planned.cost.forwards) == (0, 0, 0)
    assert guarantees(window) == SERVED
    assert planned.cost.bytes_patched == report.bytes_patched > 0
    assert window.slots[3].antecedents == tuple(pieces()[1][i].id for i in (2, 0, 1))


def served_like(window: KameraWindow, number: int, *ways) -> list[float]:
    """How far a slot's KV is from its canonical under each of these compositions, as a full patch."""
    resident = window._state.residents[number]
    canonical = window.store.get_canonical(window.context, resident.facts.chunk_id)
    home = [-step for step in window._state.frame]
    offset = [a + b for a, b in zip(resident.span.offset, home, strict=True)]
    far = []
    for made in ways:
        deltas = [
            {n: layer.get(n, torch.zeros(x.shape[1], x.shape[0] * x.shape[2])) for n, x in held.items()}
            for layer, held in zip(made.deltas, canonical.kv, strict=True)
        ]
        patch = patch_of(kv_of(deltas, canonical.kv.groups), None, canonical.kv[0]["k"].dtype).patch
        wanted = apply_patch(canonical.kv, patch, window.backbone.layout, offset)
        far.append(worst(live(window, number), wanted))
    return far


def stored_terms(window: KameraWindow, target: str, *orders) -> dict:
    """Every stored term of these orders, and the patches behind the orders themselves."""
    wanted = {term for order in orders for term in (*terms_of(order), *triples_of(order), tuple(order))}
    found = {t: window.store.get_patch(window.context, target, t) for t in wanted}
    return {term: record.patch for term, record in found.items() if record is not None}


def test_what_is_served_is_the_composition_of_the_stored_terms():
    window = opened()
    window.reorder(ORDER)
    *old, target = (c.id for c in pieces()[1])
    order = [old[i] for i in (2, 0, 1)]
    terms = stored_terms(window, target, order, old)
    known = compose(terms, order, (old, terms[tuple(old)]))
    same, other = served_like(window, 3, compose(terms, order), known)
    assert same < 1e-5 and other > 1e-3  # the patch of the old order is no help after a reorder


def test_the_old_patch_is_made_use_of_after_a_departure():
    store, (backbone, chunks) = form("memory://", 5), rig("qwen2_5_vl", 5)
    window = make(backbone, store, *chunks, policy=COMPOSED, on_leave="repair")
    *old, target = (c.id for c in chunks)
    assert window.evict(1).forwards == 0 and guarantees(window)[3] == "composed"
    order = [old[i] for i in (0, 2, 3)]
    terms = stored_terms(window, target, order, old)
    known = compose(terms, order, (old, terms[tuple(old)]))
    same, other = served_like(window, 3, known, compose(terms, order))
    assert same < 1e-5 and other > 1e-3


def test_triples_are_read_where_they_are_stored():
    store, (backbone, chunks) = form("memory://", 5), rig("qwen2_5_vl", 5)
    window = make(backbone, store, *chunks, policy=COMPOSED)
    *old, target = (c.id for c in chunks)
    assert window.form_pairs(4, triples="all").forwards > 0
    order = [old[i] for i in (1, 0, 2, 3)]
    assert window.reorder([1, 0, 2, 3, 4]).forwards == 0 and guarantees(window)[4] == "composed"
    terms = stored_terms(window, target, order)
    assert len([term for term in terms if len(term) == 3]) == 4
    pairs = {term: patch for term, patch in terms.items() if len(term) < 3}
    same, other = served_like(window, 4, compose(terms, order), compose(pairs, order))
    assert same < 1e-5 and other > 1e-3


def test_a_damaged_triple_is_refused_and_the_rest_is_composed(tmp_path):
    backbone, chunks = rig("qwen2_5_vl", 5)
    with form(tmp_path / "s", 5) as store:
        window = make(backbone, store, *chunks, policy=COMPOSED)
        window.form_pairs(4, triples="all")
        *old, target = (c.id for c in chunks)
        order = tuple(old[i] for i in (1, 0, 2, 3))
        damage(store, "exact", target, order[:3])
        report = window.reorder([1, 0, 2, 3, 4])
        assert report.forwards == 0 and guarantees(window)[4] == "composed"
        assert any("patch refused" in note for note in report.notes)


def test_a_composed_chunk_saves_and_forks_and_moves(tmp_path):
    window = opened()
    window.reorder(ORDER)
    branch = window.fork()
    window.save(tmp_path / "w")
    again = KameraWindow.load(tmp_path / "w", window.backbone, formed())
    assert guarantees(again) == guarantees(branch) == SERVED
    assert branch.slide().forwards == 0
    assert guarantees(branch) == ["survivor", "survivor", "near"]


def test_composed_comes_before_orbit_and_after_its_own_order(tmp_path):
    with form(tmp_path / "s") as store:
        window = opened(store)
        window.form_orbit(3)
        for policy, served in ((COMPOSED, "composed"), (replace(COMPOSED, minimum="orbit"), "orbit")):
            window = opened(store, policy)
            window.reorder(ORDER)
            assert guarantees(window)[3] == served
        make(
            pieces()[0], store, *(pieces()[1][i] for i in ORDER), policy=replace(COMPOSED, minimum="patched")
        )
        window = opened(store)
        window.reorder(ORDER)
        assert guarantees(window)[3] == "patched"


def test_a_plan_estimates_its_bytes_and_later_ones_know_them():
    """Its terms correct all layers, and it only those of the policy."""
    window = opened(policy=replace(COMPOSED, layers=(1,)))
    planned = window.plan_reorder(ORDER)
    assert window.reorder(ORDER).bytes_patched < planned.cost.bytes_patched
    patch = window._state.residents[3].copy.patch
    assert [n for n, layer in enumerate(patch.layers) if layer] == [1]
    window.condition(3, False)
    planned = window.plan_condition(3, True)
    assert window.condition(3, True).bytes_patched == planned.cost.bytes_patched == patch.nbytes


# -- refusals --------------------------------------------------------------------------------------


def test_doubt_above_the_limit_is_refused_and_noted():
    window = opened(policy=replace(COMPOSED, max_doubt=0.0, on_miss="prefill"))
    assert window.plan_reorder(ORDER).cost.forwards == 0  # rows do not tell how far terms agree
    report = window.reorder(ORDER)
    (note,) = report.notes
    assert "composed patch refused" in note and "doubt" in note and "above 0.00" in note
    assert report.forwards == 1 and guarantees(window) == [*SERVED[:3], "patched"]


def test_a_damaged_term_is_refused_and_costs_a_forward(tmp_path):
    with form(tmp_path / "s") as store:
        window = opened(store)
        damage(store, "exact", pieces()[1][3].id)
        report = window.reorder(ORDER)
        assert report.forwards == 1 and any("patch refused" in note for note in report.notes)
        assert guarantees(window)[3] == "patched"  # behind patched KV a forward is that much


@pytest.mark.parametrize("minimum", ["patched", "orbit"])
def test_a_policy_that_does_not_admit_it_runs_a_forward(minimum):
    window = opened(policy=replace(COMPOSED, minimum=minimum, on_miss="prefill"))
    assert window.reorder(ORDER).forwards == 1
    assert "composed" not in guarantees(window)


def test_without_a_finding_a_certificate_withholds_it():
    backbone, _ = pieces()
    findings: dict[Guarantee, object] = {g: f for g, f in ALL_SAFE.items() if g != "composed"}
    policy = replace(COMPOSED, certified=True, on_miss="prefill")
    for found, forwards in ((ALL_SAFE, 0), (findings, 1)):
        held = certificate(backbone, FULL_RANK, findings=found)
        with pytest.warns(UncertifiedBackbone) if forwards else nullcontext():
            window = opened(policy=policy, certificate=held)
        assert window.reorder(ORDER).forwards == forwards
    assert window.policy.withheld == {"composed"}


# -- served by name only ---------------------------------------------------------------------------


def test_no_order_of_three_is_composed_on_the_terms_doubt_alone():
    """η of composed patches fell to .755 at four antecedents on a backbone whose doubt refused none of 22."""
    window = opened(policy=replace(COMPOSED, composed_up_to=0, certified=False, on_miss="prefill"))
    planned = window.plan_reorder(ORDER)
    report = window.reorder(ORDER)
    assert planned.cost.forwards == report.forwards == 1
    assert guarantees(window) == ["exact", "patched", "patched", "patched"]  # a forward behind patched KV
    (note,) = [note for note in report.notes if "composed" in note]
    assert note.startswith(f"composed patch refused: chunk {window.slots[3].chunk_id[:12]} stands behind 3,")
    assert "no certificate of this backbone found composed patches safe behind so many" in note
    assert note in planned.notes


def test_a_repair_does_not_compose_on_the_terms_doubt_alone():
    store, (backbone, chunks) = form("memory://", 5), rig("qwen2_5_vl", 5)
    policy = ReusePolicy(rank=FULL_RANK, certified=False, max_doubt=1.0, forms="always")
    window = make(backbone, store, *chunks, policy=policy, on_leave="repair")
    report = window.slide()
    assert "composed" not in guarantees(window)
    assert any(note.startswith("composed patch refused") for note in report.notes)


def test_the_number_of_antecedents_is_the_policys():
    store, (backbone, chunks) = form("memory://", 5), rig("qwen2_5_vl", 5)
    window = make(backbone, store, *chunks, policy=replace(COMPOSED, composed_up_to=3, certified=False))
    report = window.reorder([1, 0, 2, 3, 4])
    assert guarantees(window)[3:] == ["composed", "patched"] and report.forwards == 1
    (note,) = [note for note in report.notes if note.startswith("composed patch refused")]
    assert "stands behind 4," in note and "(composed_up_to=3)" in note


def test_a_certificate_serves_the_number_it_was_measured_at():
    store, (backbone, chunks) = form("memory://", 5), rig("qwen2_5_vl", 5)
    policy = replace(COMPOSED, composed_up_to=0, certified=True)
    for measured, served in ((3, ["composed", "patched"]), (4, ["composed", "composed"])):
        held = certificate(backbone, FULL_RANK, antecedents=measured)
        window = make(backbone, store, *chunks, policy=replace(policy, on_miss="prefill"), certificate=held)
        window.reorder([1, 0, 2, 3, 4])
        assert guarantees(window)[3:] == served
    unsafe = certificate(backbone, FULL_RANK, findings=but("composed", "unsafe", "it was wrong"))
    window = make(backbone, store, *chunks, policy=replace(policy, composed_up_to=6), certificate=unsafe)
    window.reorder([1, 0, 2, 3, 4])
    assert "composed" not in guarantees(window)


@pytest.mark.parametrize("wrong", [1, 2, 7, -1, 3.0, True, None])
def test_a_number_that_is_never_composed_is_refused(wrong):
    with pytest.raises(
        ValueError, match=r"composed_up_to .* must be a number of antecedents from 3 to 6, or 0"
    ):
        ReusePolicy(composed_up_to=wrong, forms="always")


# -- decided from rows -----------------------------------------------------------------------------


def terms(target: str, *orders: str) -> Fake:
    rows = everything(*"abcdefgx")
    rows.patches = {(target, term, "exact"): "exact" for order in orders for term in terms_of(tuple(order))}
    return rows


def recalled(rows: Fake, before: str):
    policy = replace(POLICY, minimum="composed", composed_up_to=6)
    return decided(Recall(new("x"), False), standing(*before), rows, policy, limits())


def test_all_terms_of_the_order_have_to_be_there():
    rows = terms("x", "abc")
    assert worths(recalled(rows, "abc"))[-1] == "composed"
    assert worths(recalled(rows, "acb"))[-1] == "exact"  # the pair (c, b) is missing
    rows.patches["x", ("b",), "exact"] = "survivor"
    assert worths(recalled(rows, "abc"))[-1] == "exact"  # formed behind something else


def test_an_antecedent_that_stands_twice_has_no_pairs():
    rows = terms("x", "aab", "aba", "baa")
    assert worths(recalled(rows, "aba"))[-1] == "exact"


def test_more_antecedents_than_were_measured_are_not_composed():
    rows = terms("x", "abcdefg")
    assert worths(recalled(rows, "abcdef"))[-1] == "composed"
    assert worths(recalled(rows, "abcdefg"))[-1] == "exact"


def test_two_antecedents_take_their_own_pair():
    made = recalled(terms("x", "ab"), "ab")
    assert (worths(made)[-1], made.cost.forwards) == ("patched", 0)


def test_what_was_doubted_is_not_offered_again():
    rows = terms("x", "abc")
    rows.doubts.add(("x", ("a", "b", "c")))
    assert (worths(recalled(rows, "abc"))[-1], recalled(rows, "abc").cost.forwards) == ("exact", 1)


def test_the_old_patch_is_known_after_departures_without_triples():
    def known(now: str, *missing: str, triples: tuple[str, ...] = (), old: str = "abcde") -> tuple[str, ...]:
        held = {term for order in (now, old) for term in terms_of(tuple(order))}
        held |= {tuple(old), *map(tuple, triples)}
        held -= set(map(tuple, missing))
        rows = TermRows(lambda behind: "exact" if behind in held else None, lambda behind: 1)
        offer = composed_offer(tuple(now), standing(*old, "x").seats[-1], rows, 1.0)
        assert offer is not None and set(offer.triples) == set(map(tuple, triples))
        return offer.known

    assert known("acde") == tuple("abcde")
    assert known("acde", "abcde") == known("acde", "ab") == ()  # nothing is known, or its terms are missing
    assert known("acde", triples=("acd", "ade")) == tuple("abcde")
    assert known("acde", triples=("acd", "ace", "ade", "cde")) == ()
    assert known("bde") == tuple("abcde")  # three have no triples
    assert known("abced") == known("aedc") == known("acdef", old="abcde") == ()
