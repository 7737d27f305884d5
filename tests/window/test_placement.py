"""Assembly in the cheapest order against all orders, what depends on a chunk, and what both refuse."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from kamera import ChunkStore, ReusePolicy
from kamera.errors import UnknownChunk, UnknownSlot, WindowFull
from kamera.window import Arrange, Plan, Recall, former_of
from kamera.window.plan import cheapest_order
from tests.window.rig import (
    FULL_RANK,
    Prefilled,
    breaking,
    chunks_of,
    distance,
    guarantees,
    make,
    rig,
    watching,
)

FORMS = ReusePolicy(rank=FULL_RANK, forms="always")


@pytest.fixture
def pieces():
    """A store with the patches of one order of four chunks, and a new window on it."""
    backbone, chunks = rig("qwen2_5_vl", 4)
    store = ChunkStore.open("memory://")
    make(backbone, store, *[chunks[i] for i in (2, 0, 3, 1)], policy=FORMS)
    return backbone, chunks, make(backbone, store, policy=FORMS)


def test_chunks_stand_in_the_order_in_which_their_stored_patches_are_valid(pieces):
    backbone, chunks, window = pieces
    costs = {order: window.plan(Arrange([chunks[i] for i in order])).cost for order in permutations(range(4))}
    assert costs[0, 1, 2, 3].forwards > 0
    with watching(backbone) as seen:
        report = window.assemble(chunks)
    best = tuple(chunks.index(chunk) for chunk in chunks_of(window, chunks))
    assert (report.operation, report.tokens_recomputed) == ("assemble", seen.tokens)
    assert seen.tokens == costs[best].tokens == min(cost.tokens for cost in costs.values()) == 0
    assert best == (2, 0, 3, 1) and guarantees(window) == ["exact", "patched", "patched", "patched"]
    plain = Prefilled(backbone, chunks_of(window, chunks))
    assert max(distance(window, i, plain) for i in range(4)) <= 1e-4


def test_seven_chunks_never_cost_more_than_in_the_order_given():
    backbone, chunks = rig("qwen2_5_vl", 7)
    store = ChunkStore.open("memory://")
    make(backbone, store, *[chunks[i] for i in (6, 4, 2, 0)], policy=FORMS)
    window = make(backbone, store, policy=FORMS)
    given = window.plan(Arrange(chunks)).cost
    report = window.assemble(chunks)
    assert report.tokens_recomputed <= given.tokens - chunks[4].num_tokens
    assert {slot.chunk_id for slot in window.slots} == {chunk.id for chunk in chunks}


def test_a_chunk_may_be_a_slot_an_id_or_new_and_what_is_not_named_leaves(pieces):
    backbone, chunks, window = pieces
    window.append(chunks[2])
    window.append(chunks[1])
    new = backbone.chunk_from_tensors([41, 42, 43])
    with watching(backbone) as seen:
        window.assemble([window.slots[0], chunks[0].id[:16], chunks[3].id, new, chunks[2]])
    assert seen.encodes == 0
    assert {s.chunk_id for s in window.slots} == {c.id for c in (chunks[2], chunks[0], chunks[3], new)}
    plan = Plan.from_json(window.plan(Arrange([*window.slots, Recall(chunks[1].id)])).to_json())
    assert window.run(plan, chunks=[chunks[1]]).slots[-1].chunk_id == chunks[1].id


def test_what_does_not_fit_is_named_and_stays_out(pieces):
    backbone, chunks, window = pieces
    room = former_of(window).anchor.length + chunks[0].num_tokens + chunks[3].num_tokens
    broken = window.fork()
    with breaking(backbone), pytest.raises(RuntimeError, match="says the test"):
        broken.assemble([backbone.chunk_from_tensors([41, 42]), *chunks], max_tokens=room)
    assert not any("do not fit" in note for note in broken.append(chunks[0]).notes)
    report = window.assemble(chunks, max_tokens=room)
    assert [s.chunk_id for s in window.slots] == [chunks[0].id, chunks[3].id]
    assert any("2 of 4 chunks do not fit" in note and chunks[1].id[:12] in note for note in report.notes)
    assert not any("do not fit" in note for note in window.slide().notes)


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda w, c: w.assemble([]), ValueError, "at least one chunk"),
        (lambda w, c: w.assemble("ab"), ValueError, "a list"),
        (lambda w, c: w.assemble(c, order="best"), ValueError, "best"),
        (lambda w, c: w.assemble(c, max_tokens=0), ValueError, "max_tokens=0"),
        (lambda w, c: w.assemble(c, max_tokens=5), WindowFull, "none of 4 chunks fits"),
        (lambda w, c: w.assemble(["f" * 64]), UnknownChunk, "f" * 12),
        (lambda w, c: w.dependents(7), UnknownSlot, "7"),
    ],
)
def test_refusals_leave_the_window_as_it_was(pieces, ask, error, says):
    _, chunks, window = pieces
    window.append(chunks[2])
    before = window.slots
    with pytest.raises(error, match=says):
        ask(window, chunks)
    assert window.slots == before


def test_dependents_are_those_conditioned_on_a_chunk_and_cost_what_their_repair_runs(pieces):
    backbone, chunks, window = pieces
    for i in (2, 0, 3, 1):
        window.append(chunks[i])
    clean = window.fork()
    clean.condition(2, False)
    assert [slot.chunk_id for slot in clean.dependents(0)] == [chunks[0].id, chunks[1].id]
    with watching(backbone) as seen:
        found = window.dependents(0)
        assert window.dependents(3) == {}
    assert seen.forwards == 0
    assert [slot.chunk_id for slot in found] == [chunks[i].id for i in (0, 3, 1)]
    with watching(backbone) as seen:
        window.run(Arrange(window.slots[1:]))
    costs = found.values()
    assert (seen.forwards, seen.tokens) == (sum(c.forwards for c in costs), sum(c.tokens for c in costs))
    assert seen.tokens > 0


@pytest.mark.parametrize("count", [3, 6])
def test_no_order_is_dearer_than_the_given_one_whatever_the_prices(count):
    """Prices drawn at random lead a search astray; of few chunks all orders are compared."""
    for seed in range(20):

        def price(order, seed=seed):
            return random.Random(f"{seed} {[*order]}").randrange(100), 0.0

        items = list(range(count))
        found = cheapest_order(items, price)
        assert sorted(found) == items and price(found) <= price(items)
        if count == 3:
            assert price(found) == min(map(price, permutations(items)))
