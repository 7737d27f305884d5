"""Which prefills leave a patch behind: a table of what is stored and what was prefilled."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kamera.ops import PatchBudget
from kamera.patches import Stored, possible_names, stored_patch, worth_harvesting
from kamera.store import ChunkStore, ObjectInfo, survivor_id
from kamera.trust import GUARANTEES, Proof, guarantee_named, outranks, sketch
from kamera.trust.proof import KV_BOUND, NEAR_EXACT
from tests.store.builders import patch

CHUNKS = ("a", "b")
SURVIVORS = ("a", survivor_id("b", "l" * 32))


def worth(formed, stored=None, antecedents=CHUNKS, **options) -> bool:
    found = ((stored or {}).get(names) for names in possible_names(antecedents))
    return worth_harvesting(found, antecedents, formed, **options)


def test_a_prefill_behind_kv_down_to_a_survivors_is_worth_a_patch():
    assert [g for g in GUARANTEES if worth(g)] == [
        "exact",
        "patched",
        "sampled",
        "orbit",
        "survivor",
    ]


def test_a_leading_chunk_is_so_only_behind_another_anchor():
    assert not worth("exact", antecedents=())
    assert worth("exact", antecedents=(), leading=True)
    assert not worth("blind", antecedents=(), leading=True)


@pytest.mark.parametrize(("there", "formed"), itertools.product(["exact", "patched", "survivor"], repeat=2))
def test_a_patch_that_serves_is_bettered_only_by_stronger_kv(there, formed):
    stronger = GUARANTEES.index(formed) < GUARANTEES.index(there)
    assert worth(formed, {CHUNKS: Stored(there, serves=True)}) == stronger


@pytest.mark.parametrize(("there", "formed"), itertools.product(["exact", "patched", "survivor"], repeat=2))
def test_a_patch_that_does_not_serve_gives_way_to_all_but_weaker_kv(there, formed):
    weaker = GUARANTEES.index(formed) > GUARANTEES.index(there)
    assert worth(formed, {CHUNKS: Stored(there, serves=False)}) == (not weaker)


def test_a_patch_behind_the_chunks_themselves_spares_that_of_their_survivors():
    assert not worth("survivor", {CHUNKS: Stored("exact", True)}, SURVIVORS)
    assert worth("survivor", {CHUNKS: Stored("exact", False)}, SURVIVORS), "another key: nothing is replaced"
    assert worth("exact", {SURVIVORS: Stored("survivor", True)}, SURVIVORS)


def test_what_is_stored_is_looked_up_once_a_name_and_only_where_it_decides():
    for antecedents, looked_up in ((CHUNKS, [CHUNKS]), (SURVIVORS, [SURVIVORS, CHUNKS])):
        assert list(possible_names(antecedents)) == looked_up
    for formed, stored in (("blind", None), ("survivor", Stored("exact", False))):
        left = iter((stored, Stored("exact", True)))
        assert not worth_harvesting(left, SURVIVORS, formed)
        assert len(list(left)) == (2 if formed == "blind" else 1)


def row(**info) -> ObjectInfo:
    """The row of a patch behind patched KV that was stored with ``info``."""
    with ChunkStore.open("memory://") as store:
        store.put(replace(patch(formed="patched"), info=info))
        return store.ls("exact")[0]


def test_a_row_serves_within_its_budget_and_once_it_was_asked():
    asked = PatchBudget(2).to_info()
    assert stored_patch(None, PatchBudget(1), 3, proving=False) is None
    for rank, serves in ((1, True), (2, True), (3, False)):
        assert stored_patch(row(**asked), PatchBudget(rank), 3, proving=False) == ("patched", serves)
    assert stored_patch(row(**asked), PatchBudget(2), 3, proving=True) == ("patched", False)
    one, apart = (sketch([5]),), (NEAR_EXACT + KV_BOUND) / 2
    for proof, serves in (
        (Proof(0.0, 0, 0, 0.0, ()), False),
        (Proof(0.0, 0, 5, 0.0, one), True),
        (Proof(0.0, 0, 5, apart, one), False),
        (Proof(0.0, 0, 5, apart, tuple(sketch([n]) for n in range(4))), True),
        (Proof(0.0, 1, 5, apart, one), True),  # decided: more questions would not make it a proof
    ):
        stored = stored_patch(row(**asked, **proof.to_info()), PatchBudget(2), 3, proving=True)
        assert stored == ("patched", serves), proof
    assert stored_patch(row(asked_rank="many"), PatchBudget(1), 3, proving=False) == ("patched", False), (
        "no valid budget"
    )


def test_of_two_formations_the_stronger_outranks_and_an_unknown_one_is_the_weakest():
    pairs = itertools.product(GUARANTEES, repeat=2)
    higher = {(a, b) for a, b in pairs if outranks(a, b)}
    assert higher == set(itertools.combinations(GUARANTEES, 2))
    assert guarantee_named("of a newer version") == "blind" == guarantee_named(None)
    assert not outranks("of a newer version", "blind") and outranks("near", None)
