"""Forwards that are saved: of a text's known beginning, and of a stored system prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kamera.errors import StoreError
from kamera.ops import kv_copy, kv_of, kv_slice
from kamera.patches import (
    Facts,
    Losses,
    Worth,
    anchor_of,
    later_of,
    prefill_anchor,
    prefill_behind,
    prefix_kv,
)
from kamera.patches.owed import waiting_records
from kamera.store import ChunkStore
from tests.engines.compare import worst
from tests.patches.engine import ANCHOR, behind_all, conditioned, former_of, text
from tests.patches.test_later import Gate

LONG = text(1, tokens=9)
START = Facts("start", replace(LONG.encoded, input_ids=LONG.encoded.input_ids[:5]), "")


@pytest.fixture
def store(tmp_path):
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


# -- heads -------------------------------------------------------------------------------------


def test_a_head_is_the_kv_of_equal_tokens_at_equal_positions():
    ids, places = torch.arange(6), torch.arange(6)[None]
    kv = kv_of([{"k": torch.randn(1, 6, 4)}])
    head = prefix_kv(ids, places, ids, places, kv, 4)
    assert torch.equal(head[0]["k"], kv[0]["k"][:, :4])
    assert head[0]["k"].data_ptr() == kv[0]["k"].data_ptr(), "a view"


@pytest.mark.parametrize("change", ["a token", "a position", "too few tokens"])
def test_a_head_of_other_tokens_or_places_is_none(change):
    ids, places = torch.arange(6), torch.arange(6)[None]
    others, there = ids.clone(), places.clone()
    kv = kv_of([{"k": torch.randn(1, 6, 4)}])
    if change == "a token":
        others[3] += 1
    elif change == "a position":
        there[0, 3] += 1
    else:
        others = others[:3]
    assert prefix_kv(ids, places, others, there, kv, 4) is None
    others, there = ids.clone(), places.clone()
    others[4], there[0, 5] = 9, 9
    assert prefix_kv(ids, places, others, there, kv, 4) is not None, "what differs behind it does not count"


@pytest.mark.parametrize(("tokens", "run"), [(0, 9), (5, 4), (9, 0)])
def test_only_what_follows_a_head_is_run(engine, store, tokens, run):
    former = former_of(engine, store)
    whole, _ = conditioned(former, LONG)
    head = kv_slice(whole.kv, 0, tokens)
    with engine.measure() as work:
        kv = prefill_behind(engine, LONG.encoded, whole.positions, former.anchor_span, head)
    assert (work.forwards, work.tokens) == (min(run, 1), run)
    assert worst(kv, whole.kv) <= 1e-5


def test_a_head_taken_over_is_the_callers_own(engine, store):
    former = former_of(engine, store)
    whole, _ = conditioned(former, LONG)
    kept = kv_copy(whole.kv)
    got = prefill_behind(engine, LONG.encoded, whole.positions, former.anchor_span, whole.kv)
    for layer in got:
        layer["k"].zero_()
    assert worst(whole.kv, kept) == 0


def test_a_canonical_continues_from_that_of_its_beginning(engine, store):
    former = former_of(engine, store)
    former.canonical(START)
    with engine.measure() as work:
        got = former.canonical(replace(LONG, heads=(("unknown", 7), (START.chunk_id, 5))))
    assert work.tokens == 4
    assert worst(got.kv, behind_all(engine, LONG)) <= 1e-5


def test_the_first_stored_head_counts_even_if_it_does_not_fit(engine, store):
    former = former_of(engine, store)
    former.canonical(START)
    former.canonical(text(7))
    facts = replace(LONG, heads=((text(7).chunk_id, 5), (START.chunk_id, 5)))
    with engine.measure() as work:
        got = former.canonical(facts)
    assert work.tokens == LONG.length
    assert worst(got.kv, behind_all(engine, LONG)) <= 1e-5


# -- anchors -----------------------------------------------------------------------------------


def test_an_anchor_is_prefilled_once_a_store(engine, store):
    first = prefill_anchor(engine, None, store)
    with engine.measure() as work:
        again = prefill_anchor(engine, None, store)
        other = prefill_anchor(engine, [4, 5], store)
    assert work.tokens == 2
    assert (first.digest == again.digest, first.digest == other.digest) == (True, False)
    assert worst(again.kv, first.kv) == 0 and again.length == len(ANCHOR)


def test_an_anchor_stored_for_other_positions_is_prefilled_again(engine, store, monkeypatch):
    prefill_anchor(engine, None, store)
    monkeypatch.setattr(engine, "positions", lambda ids, inputs: torch.arange(1, 1 + len(ids[0]))[None])
    with engine.measure() as work:
        got = prefill_anchor(engine, None, store)
    assert work.forwards == 1 and got.positions[0].tolist() == [1, 2, 3]


def test_a_damaged_anchor_is_prefilled_and_stored_again(engine, store, tmp_path):
    prefill_anchor(engine, None, store)
    (row,) = store.ls("anchor")
    (path,) = (tmp_path / "store").rglob(f"{row.key}.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with ChunkStore.open(tmp_path / "store") as again, engine.measure() as work:
        prefill_anchor(engine, None, again)
        prefill_anchor(engine, None, again)
    assert work.forwards == 1


def test_an_anchor_without_tokens_is_stored_nowhere(engine, store):
    got = prefill_anchor(engine, [], store)
    assert (got.length, store.ls()) == (0, [])


def test_an_anchor_that_the_store_refuses_is_used_all_the_same(engine, store, monkeypatch):
    def full(records):
        raise StoreError("no room, says the test")

    monkeypatch.setattr(store, "put_many", full)
    notes: list[str] = []
    losses = Losses()
    with losses.note_in(notes), pytest.warns(match="goes on without its store"):
        got = anchor_of(engine, ANCHOR, "", "", store, losses)
    assert got.length == 3 and notes == ["the system prompt was not kept: no room, says the test"]
    with pytest.raises(StoreError):
        anchor_of(engine, ANCHOR, "", "", store)


@pytest.mark.filterwarnings("ignore::kamera.errors.NotKept")
@pytest.mark.parametrize(
    ("error", "why"),
    [(ValueError("says the test"), "ValueError: says the test"), (StoreError("no room"), "no room")],
)
def test_whatever_an_anchor_fails_on_in_later_work_is_noted(engine, store, monkeypatch, error, why):
    def failing(records):
        raise error

    monkeypatch.setattr(store, "put_many", failing)
    notes: list[str] = []
    losses = Losses()
    anchor_of(engine, ANCHOR, "", "", store, losses, later=True)
    later_of(engine).flush()
    with losses.note_in(notes):
        pass
    assert notes == [f"the system prompt was not kept: {why}"]
    assert losses.unkept == set(), "it is no chunk"


def test_an_anchor_that_later_work_drops_waits_no_more_and_is_noted(engine, store):
    queue, losses, notes = later_of(engine), Losses(), list[str]()
    gate = Gate(queue)
    anchor_of(engine, ANCHOR, "", "", store, losses, later=True)
    assert len(waiting_records(store).anchors) == 1
    queue.limit = 1
    queue.add(lambda: None, Worth.CHUNK, [torch.zeros(9)])
    gate.open()
    queue.flush()
    assert waiting_records(store).anchors == {}
    with losses.note_in(notes):
        pass
    assert notes == ["the system prompt was not kept: later work held more than its 1 bytes"]
