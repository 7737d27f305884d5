"""Patches of one context: which are formed and kept, and what they make of a canonical."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kamera.errors import NotRelocatable
from kamera.ops import PatchBudget, apply_patch, kv_tokens
from kamera.patches import Later, harvest, keep_patch
from kamera.patches.line import Line
from kamera.store import ChunkStore, survivor_id
from kamera.trust import Proof, sketch
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


def test_the_small_engine_decodes_what_the_whole_sequence_would(engine, former):
    line = Line(former)
    line.arrange([A, B])
    live = engine.live()
    live.show(line.before.spans)
    ids = torch.cat([former.anchor.input_ids, A.encoded.input_ids, B.encoded.input_ids, torch.tensor([5, 6])])
    behind = engine.decode(ids, engine.positions([ids], [{}]), live, max_new_tokens=3)
    plain = engine.decode(ids, engine.positions([ids], [{}]), engine.live(), max_new_tokens=3)
    assert behind.tokens.tolist() == plain.tokens.tolist()
    assert behind.tokens.shape == (1, 3)


def test_the_small_engine_decodes_behind_spans_that_come_with_the_question(engine, former):
    live, question = engine.live(), torch.tensor([5, 6])
    live.show([former.anchor_span])
    ids = torch.cat([former.anchor.input_ids, A.encoded.input_ids, B.encoded.input_ids, question])
    positions = engine.positions([ids], [{}])
    made = engine.decode(ids, positions, live, [A.encoded, B.encoded], max_new_tokens=3)
    line = Line(former)
    line.arrange([A, B])
    live.show(line.before.spans)
    assert made.tokens.tolist() == engine.decode(ids, positions, live, max_new_tokens=3).tokens.tolist()
    assert [kv_tokens(kv) for kv in (*made.kvs, made.tail)] == [A.length, B.length, 4]
    assert worst(made.kvs[1], behind_all(engine, A, B)) <= 1e-5


# -- patches -----------------------------------------------------------------------------------


def test_a_whole_patch_makes_the_conditioned_kv_at_its_place(engine, former):
    harvested(former, A, B, C)
    got = served(former, C, A, B, offset=A.length + B.length)
    assert worst(got, behind_all(engine, A, B, C)) <= 1e-5


def test_a_patch_belongs_to_its_order_and_to_its_chunk(former):
    harvested(former, A, B, C)
    for facts, behind in ((C, (B, A)), (C, (A,)), (B, (A,)), (A, (B, C))):
        assert former.catalogue.patch(facts.chunk_id, [b.chunk_id for b in behind], "exact") is None
    assert former.catalogue.patch(C.chunk_id, [A.chunk_id, B.chunk_id], "exact") is not None


def test_a_patch_is_seen_in_the_operation_that_formed_it(former):
    with former.operation():
        assert former.catalogue.patch(B.chunk_id, [A.chunk_id], "exact") is None
        harvested(former, A, B)
        assert former.catalogue.patch(B.chunk_id, [A.chunk_id], "exact") is not None


def test_smaller_patches_are_worse_and_better_than_none(engine, store):
    errors = []
    for rank in (1, 2, 4, 9):
        former = former_of(engine, store, PatchBudget(rank))
        harvested(former, A, B, C)
        errors.append(worst(served(former, C, A, B, offset=12), behind_all(engine, A, B, C)))
    blind = worst(apply_patch(former.canonical(C).kv, None, LAYOUT, [12]), behind_all(engine, A, B, C))
    assert [*sorted(errors, reverse=True)] == errors and errors[0] < blind and errors[-1] <= 1e-5


def test_a_leading_chunk_and_a_prefill_behind_unsound_kv_leave_no_patch(store, former):
    harvested(former, A)
    for formed in ("near", "blind"):
        harvested(former, A, B, formed=formed)
    assert store.ls("exact") == []


@pytest.mark.parametrize("formed", ["exact", "patched", "survivor"])
def test_a_patch_that_serves_is_not_formed_twice(store, former, monkeypatch, formed):
    harvested(former, A, B, formed=formed)
    monkeypatch.setattr(store, "put_many", lambda records: pytest.fail(f"{records} stored again"))
    harvested(former, A, B, formed=formed)
    harvested(former, A, B, formed="survivor")


def test_a_patch_below_the_budget_is_formed_again_and_a_larger_one_is_cut(engine, store):
    small, large = (former_of(engine, store, PatchBudget(rank)) for rank in (1, 4))
    harvested(small, A, C)
    assert large.patch(C, [A.chunk_id], "exact", "exact") is None
    harvested(large, A, C)
    (row,) = store.ls("exact")
    assert (row.rank, row.budget.rank) == (4, 4)
    assert small.patch(C, [A.chunk_id], "exact", "exact").rank == 1


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


def test_a_patch_behind_exact_kv_stays_even_if_it_is_too_small(engine, store):
    harvested(former_of(engine, store, PatchBudget(1)), A, C)
    harvested(former_of(engine, store, PatchBudget(4)), A, C, formed="patched")
    (row,) = store.ls("exact")
    assert (row.formed, row.rank) == ("exact", 1)


def test_a_patch_behind_these_very_chunks_serves_their_survivors_too(store, former):
    harvested(former, A, B)
    copy, before = conditioned(former, A, B)
    lineage = (survivor_id(A.chunk_id, "l" * 32),)
    harvest(former, B, copy, replace(before, names=lineage, formed="survivor"))
    assert [row.antecedents for row in store.ls("exact")] == [(A.chunk_id,)]


def test_a_row_that_says_something_else_is_refused_for_the_operation(former):
    harvested(former, A, B, formed="patched")
    with former.operation():
        assert former.patch(B, [A.chunk_id], "exact", "exact") is None
        assert former.catalogue.has_refused(B.chunk_id, [A.chunk_id], "exact")
        assert former.catalogue.patch(B.chunk_id, [A.chunk_id], "exact") is None
    assert former.catalogue.patch(B.chunk_id, [A.chunk_id], "exact") is not None
    assert former.patch(B, [A.chunk_id], "exact", "patched") is not None
    proof = Proof(0.0, 0, 1, 0.0, (sketch([5]),))
    assert former.patch(B, [A.chunk_id], "exact", "patched", proof=proof) is None


def test_a_chunk_whose_tokens_shift_against_each_other_is_refused(former):
    copy, before = conditioned(former, A, B)
    bent = copy.positions.clone()
    bent[0, -1] += 1
    with pytest.raises(NotRelocatable, match=f"chunk {B.chunk_id[:12]} does not move as a whole"):
        keep_patch(former, B, replace(copy, positions=bent), before)


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


def test_a_base_that_is_gone_is_refused_and_nothing_is_formed(engine, store, former):
    former.canonical(B)
    other = former_of(engine, store, system=[7, 8])
    assert other.catalogue.base(B.chunk_id) is not None
    with other.operation():
        assert not keep_patch(other, B, *conditioned(other, A, B), "gone")
        assert other.catalogue.base(B.chunk_id) is None
    assert store.ls("exact") == []


def test_a_former_within_another_budget_shares_everything_else(former):
    other = former.with_budget(PatchBudget(2))
    assert (other.budget.rank, former.budget.rank) == (2, 64)
    assert other.catalogue is former.catalogue and other.store is former.store
    with pytest.raises(ValueError, match="layer 7 of a model of 2 layers"):
        former.with_budget(PatchBudget(2, layers=(7,)))


def test_a_patch_in_the_background_is_waited_for_when_it_is_looked_up(engine, store, monkeypatch):
    queue = Later()
    former = former_of(engine, store, queue=queue)
    for facts in (A, B):
        former.canonical(facts)
    go, put, late = threading.Event(), store.put_many, []

    def slow(records):
        late.append(go.wait(60))
        return put(records)

    monkeypatch.setattr(store, "put_many", slow)
    harvested(former, A, B)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(former.catalogue.patch, B.chunk_id, [A.chunk_id], "exact")
        assert not found.done() and store.ls("exact") == []
        go.set()
        assert found.result(60) is not None
    assert late == [True]
    queue.flush()


# -- lines -------------------------------------------------------------------------------------


def test_lines_with_a_common_beginning_prefill_it_once(engine, former):
    line = Line(former)
    line.arrange([A, B, C])
    with engine.measure() as work:
        line.arrange([A, B])
        line.arrange([A, B, C])
    assert work.tokens == C.length
    with engine.measure() as work:
        line.arrange([A, C, B])
    assert work.tokens == C.length + B.length
    assert worst(line.prefill(A).kv, behind_all(engine, A, C, B, A)) <= 1e-5
    assert line.before.chunks == (A, C, B)


def test_a_line_in_a_store_of_codes_begins_with_what_the_model_computed(engine):
    with ChunkStore.open("memory://", kv="int8") as coded:
        former = former_of(engine, coded)
        former.canonical(A)
        first = Line(former).append(A)
    assert not first.lossy
    assert worst(first.kv, behind_all(engine, A)) <= 1e-5
