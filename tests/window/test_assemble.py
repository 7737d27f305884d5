"""Windows assembled on a real model: what was planned is what runs, and the answer is right."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.errors import UnknownChunk, UnknownSlot, WindowFull
from kamera.window import Arrange, Assemble, Cost, Plan, Replace, dependents, read_trace
from tests.window.rig import FULL_RANK, SYSTEM, is_a_reprefill, live, make, rig, same_bits, watching

FORMING = ReusePolicy(rank=FULL_RANK, forms="always", on_miss="form", certified=False)
SERVING = ReusePolicy(rank=FULL_RANK, forms="returning", on_miss="prefill", certified=False)


def filled(orders, chunks, backbone) -> ChunkStore:
    """A store that windows of these orders left behind."""
    store = ChunkStore.open("memory://")
    for order in orders:
        window = make(backbone, store, *(chunks[i] for i in order), policy=FORMING)
        window.evict(len(order) - 1)
        window.flush()
    return store


def ran(cost: Cost) -> tuple[int, int]:
    return cost.tokens, cost.forwards


def spent(seen) -> tuple[int, int]:
    return seen.tokens, seen.forwards


@settings(max_examples=5, deadline=None)
@given(random=st.randoms(use_true_random=True))
def test_an_assembly_runs_what_its_plan_showed_and_no_order_runs_less(random: Random):
    backbone, chunks = rig("qwen2_5_vl", 4)
    lengths = [random.randint(1, 4) for _ in range(3)]
    store = filled([random.sample(range(4), n) for n in lengths], chunks, backbone)
    window = make(backbone, store, *random.sample(chunks, random.randint(0, 2)), policy=SERVING)
    window.flush()
    there = {slot.chunk_id: slot for slot in window.slots}
    costs = [
        ran(window.plan(Arrange([there.get(c.id, c) for c in order])).cost)
        for order in itertools.permutations(chunks)
    ]
    shown = window.plan(Assemble(chunks))
    assert ran(shown.cost) == min(costs)
    with watching(backbone) as seen:
        report = window.run(shown)
    assert (spent(seen), seen.encodes) == (ran(shown.cost), shown.cost.encodes)
    assert (report.operation, report.forwards) == ("assemble", seen.forwards)
    assert shown.after.chunk_ids == tuple(slot.chunk_id for slot in window.slots)
    assert is_a_reprefill(window, chunks)


def test_a_stored_order_is_assembled_from_ids_without_a_forward_or_an_encode():
    backbone, chunks = rig("qwen2_5_vl", 4)
    store = filled([(2, 0, 3, 1)], chunks, backbone)
    window = make(backbone, store, policy=SERVING)
    ids = [chunk.id for chunk in chunks]
    with watching(backbone) as seen:
        report = window.run(Assemble(ids))
    assert (spent(seen), seen.encodes, report.tokens_recomputed) == ((0, 0), 0, 0)
    assert [ids.index(slot.chunk_id) for slot in window.slots] == [2, 0, 3, 1]
    with watching(backbone) as seen:
        window.run(Assemble([*ids, ids[0], window[1]], order="given"))  # one that is given twice stands once
    assert spent(seen) != (0, 0)
    assert [slot.chunk_id for slot in window.slots] == ids


def test_a_chunk_of_the_window_keeps_its_kv_and_others_leave():
    backbone, chunks = rig("qwen2_5_vl", 4)
    window = make(backbone, None, *chunks[:3], policy=SERVING)
    window.flush()
    first, kv = window[0], live(window, 0)
    report = window.run(Assemble([chunks[3], window[0]]))
    assert [slot.chunk_id for slot in window.slots] == [chunks[0].id, chunks[3].id]
    assert window[0].number == first.number and same_bits(live(window, 0), kv)
    assert {slot.chunk_id for slot in report.evicted} == {chunks[1].id, chunks[2].id}
    window.recall(chunks[1].id)  # what left is archived


def test_chunks_that_do_not_fit_are_named_and_the_first_ones_stand():
    backbone, chunks = rig("qwen2_5_vl", 4)
    window = make(backbone, None, policy=SERVING, max_tokens=4 + 2 * 12 + 5)
    report = window.run(Assemble(chunks))
    assert {slot.chunk_id for slot in window.slots} == {chunks[i].id for i in (0, 1, 3)}
    assert any(f"do not fit: {chunks[2].id[:12]}" in note for note in report.notes)
    window.run(Assemble(chunks, max_tokens=4 + 12))
    assert [slot.chunk_id for slot in window.slots] == [chunks[0].id]
    with pytest.raises(WindowFull, match="none of 4 chunks fits"):
        window.run(Assemble(chunks, max_tokens=6))
    assert len(window) == 1


def test_a_plan_that_was_written_down_runs_and_brings_stored_chunks_by_their_ids():
    backbone, chunks = rig("qwen2_5_vl", 4)
    window = make(backbone, filled([(1, 0)], chunks, backbone), policy=SERVING)
    shown = window.plan(Assemble([chunks[0].id, chunks[1].id, chunks[2]]))
    window.run(Plan.from_json(shown.to_json()), chunks=[chunks[2]])
    assert tuple(slot.chunk_id for slot in window.slots) == shown.after.chunk_ids
    assert shown.after.chunk_ids == (chunks[1].id, chunks[0].id, chunks[2].id)


@pytest.mark.parametrize(
    ("chunks", "options", "says"),
    [
        ([], {}, "at least one chunk"),
        ("a text", {}, "a list of at least one chunk"),
        (["ab"], {"order": "any"}, "order 'any' is neither"),
        (["ab"], {"max_tokens": 0}, "max_tokens 0 is no number of tokens"),
    ],
)
def test_an_assembly_that_cannot_be_meant_is_refused(chunks, options, says):
    backbone, _ = rig("qwen2_5_vl", 1)
    with pytest.raises(ValueError, match=says):
        make(backbone).run(Assemble(chunks, **options))


def test_a_string_is_the_id_of_a_stored_chunk_and_never_text():
    backbone, chunks = rig("qwen2_5_vl", 2)
    window = make(backbone, None, chunks[0])
    with pytest.raises(UnknownChunk):
        window.run(Assemble([chunks[0], "no such chunk"]))
    assert [slot.chunk_id for slot in window.slots] == [chunks[0].id]


def test_a_trace_tells_which_chunks_an_assembly_placed(tmp_path):
    backbone, chunks = rig("qwen2_5_vl", 4)
    window = make(backbone, None, *chunks[:2], policy=SERVING, trace=tmp_path / "t")
    window.run(Assemble([*chunks[:2], chunks[2]]))
    *_, event = read_trace(tmp_path / "t")
    assert (event.operation, event.placed, len(event.report.slots)) == ("assemble", 2, 3)


# -- cascades ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [FORMING, SERVING, ReusePolicy.exact()], ids=["form", "prefill", "exact"])
@pytest.mark.parametrize("stored", [(), (0, 2, 3)])
def test_a_cascade_is_what_a_departure_with_a_repair_runs(policy, stored):
    backbone, chunks = rig("qwen2_5_vl", 4)
    for index in range(4):
        store = filled([stored] if stored else [], chunks, backbone)
        window = make(backbone, store, *chunks, policy=policy, on_leave="repair")
        window.flush()
        slots = window.slots
        with watching(backbone) as seen:
            cascade = dependents(window, index)
        assert (spent(seen), window.slots) == ((0, 0), slots)
        assert [d.slot for d in cascade.dependents] == list(slots[index + 1 :])
        tokens = [d.left.tokens for d in cascade.dependents]
        assert (sum(tokens), sum(d.left.forwards for d in cascade.dependents)) == ran(cascade.left)
        with watching(backbone) as seen:
            window.evict(index)
        assert spent(seen) == ran(cascade.plan.cost) == ran(cascade.left)  # the chunk itself was archived
        if stored and index == 1 and policy.minimum != "exact":
            assert tokens == [0, 0], "the store holds what remains, in its order"
        elif index == 1:
            assert tokens == [slot.length for slot in slots[2:]]


@pytest.mark.parametrize("policy", [FORMING, SERVING], ids=["form", "prefill"])
def test_a_cascade_is_what_a_changed_chunk_costs_those_behind_it(policy):
    backbone, chunks = rig("qwen2_5_vl", 4)
    window = make(backbone, None, *chunks[:3], policy=policy)
    window.flush()
    cascade = dependents(window, 1)
    other = backbone.chunk_from_tensors(chunks[3].input_ids.repeat(2))
    first = make(backbone, None, chunks[0], policy=policy)
    first.flush()
    whole, own = window.plan(Replace(1, other)).cost, first.plan(Arrange([first[0], other])).cost
    assert ran(cascade.changed) == (whole.tokens - own.tokens, whole.forwards - own.forwards)
    assert [d.slot.chunk_id for d in cascade.dependents] == [chunks[2].id]
    assert cascade.dependents[0].changed == cascade.changed
    assert cascade.changed.tokens >= chunks[2].num_tokens


def test_a_blind_chunk_stands_on_nothing():
    backbone, chunks = rig("qwen2_5_vl", 3)
    store = filled([(1,), (0,), (2,)], chunks, backbone)
    window = KameraWindow(backbone, store, SYSTEM, policy=ReusePolicy(minimum="blind", certified=False))
    for chunk in chunks:
        window.append(chunk)
    cascade = dependents(window, 0)
    assert cascade.dependents == () and window[2].guarantee == "blind"
    assert cascade.left.tokens > 0, "a repair prefills blind chunks too"
    with pytest.raises(UnknownSlot):
        dependents(window, 7)
