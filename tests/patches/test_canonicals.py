"""Canonicals of one context, and the facts of chunks: read if stored, else computed and stored."""

from __future__ import annotations

import threading

import pytest
import torch

from kamera.errors import IncompatibleChunk, StoreError, UnknownChunk
from kamera.patches import Losses, keep_patch, later_of, put_owed
from kamera.store import ChunkStore, EncodingRecord, Put
from tests.engines.compare import worst
from tests.patches.engine import (
    SmallEngine,
    behind_all,
    conditioned,
    former_of,
    picture,
    text,
)

A, B = text(1), text(2)


# -- canonicals --------------------------------------------------------------------------------


def test_a_canonical_is_prefilled_behind_the_anchor_alone_and_only_once(engine, former):
    with engine.measure() as work:
        first = former.canonical(A)
        again = former.canonical(A)
    assert (work.forwards, work.tokens) == (1, A.length)
    assert worst(first.kv, behind_all(engine, A)) <= 1e-5
    assert all(torch.equal(first.kv[i][n], again.kv[i][n]) for i in range(2) for n in "kv")
    assert (first.patch, first.lossy) == (None, False)


def test_another_former_of_the_same_context_reads_what_one_has_stored(engine, store, former):
    former.canonical(A)
    other = former_of(engine, store)
    with engine.measure() as work:
        other.canonical(A)
    assert work.forwards == 0


def test_another_model_or_anchor_computes_its_own(engine, store, former):
    former.canonical(A)
    for other in (former_of(engine, store, system=[7, 8]), former_of(SmallEngine("0" * 64, seed=9), store)):
        before = other.backbone.done.forwards
        other.canonical(A)
        assert other.backbone.done.forwards == before + 1


def test_a_canonical_in_codes_is_patched_and_what_was_just_computed_is_exact(engine):
    with ChunkStore.open("memory://", kv="int8") as store:
        former = former_of(engine, store)
        fresh = former.canonical(A, leading=True)
        coded = former.canonical(A, leading=True)
    assert not fresh.lossy
    assert coded.lossy
    assert worst(fresh.kv, behind_all(engine, A)) <= 1e-5


def test_patches_are_formed_against_codes_even_where_the_chunk_has_just_led(engine):
    with ChunkStore.open("memory://", kv="int8") as store:
        former = former_of(engine, store)
        with former.operation():
            assert not former.canonical(A, leading=True).lossy
            assert former.canonical(A).lossy


def test_an_operation_reads_the_canonical_it_works_on_once(store, former, monkeypatch):
    former.canonical(A)
    asked, get = [], store.get_canonical
    monkeypatch.setattr(store, "get_canonical", lambda *given: asked.append(given) or get(*given))
    with former.operation():
        assert former.canonical(A) is former.canonical(A)
    assert len(asked) == 1
    assert former.canonical(A) is not former.canonical(A), "outside of one nothing is remembered"


class Full(ChunkStore):
    """A store without room for objects of some kinds."""

    refused: tuple[str, ...] = ()

    def put_many(self, records):
        taken = iter(super().put_many([record for record in records if record.kind not in self.refused]))
        full = StoreError("no room, says the test")
        return [Put("", full) if record.kind in self.refused else next(taken) for record in records]


def test_a_canonical_that_the_store_refuses_is_noted_and_offered_again(engine):
    losses, notes = Losses(), []
    with Full.open("memory://") as store, pytest.warns(match="goes on without its store"):
        former = former_of(engine, store, losses=losses)
        former.canonical(B)
        store.refused = ("canonical",)
        with losses.note_in(notes):
            former.canonical(A)
        assert losses.unkept == {A.chunk_id}
        assert "no room" in notes[0]
        assert keep_patch(former, A, *conditioned(former, B, A))
        assert store.ls("exact") == [], "a patch without its canonical would serve nothing"
        store.refused = ()
        put_owed([former.records_to_put(A, former.canonical(A))[1]])
        assert losses.unkept == set()
        assert former.catalogue.has_canonical(A.chunk_id)


def test_a_former_without_tolerance_for_losses_raises_them(engine):
    with Full.open("memory://") as store:
        store.refused = ("canonical",)
        with pytest.raises(StoreError, match="no room"):
            former_of(engine, store).canonical(A)


# -- chunks ------------------------------------------------------------------------------------


def test_a_known_chunk_is_found_again_by_its_id(engine, store, former):
    facts = former.encodings.make(picture(1))
    former.canonical(facts)
    found = former_of(engine, store).facts_of(facts.chunk_id)
    assert torch.equal(found.encoded.input_ids, facts.encoded.input_ids)
    assert torch.equal(found.encoded.tensors["features"], facts.encoded.tensors["features"])
    assert found.label == "picture 1"


def test_a_chunk_known_behind_another_anchor_has_its_facts_there_too(engine, store, former):
    facts = former.encodings.make(picture(1))
    former.canonical(facts)
    other = former_of(engine, store, system=[7, 8])
    with engine.measure() as work:
        found = other.facts_of(facts.chunk_id)
    assert (work.forwards, work.vision_encodes) == (0, 0)
    assert torch.equal(found.encoded.tensors["features"], facts.encoded.tensors["features"])


def test_an_unknown_chunk_and_that_of_another_model_are_refused_by_name(store, former):
    with pytest.raises(UnknownChunk, match="no chunk 'none'"):
        former.facts_of("none")
    former.canonical(A)
    other = former_of(SmallEngine("0" * 64), store)
    with pytest.raises(IncompatibleChunk, match="archived by backbone ffffffffffff"):
        other.facts_of(A.chunk_id)


def test_a_stored_picture_is_never_encoded_again(engine, store, former):
    chunk = picture(1)
    assert former.find(chunk) is None
    former.encodings.make(chunk)
    with engine.measure() as work:
        found = former.find(chunk)
    assert found is not None and found.chunk_id == chunk.id and work.vision_encodes == 0
    another = former_of(SmallEngine(vision_fingerprint="d" * 64), store)
    assert another.find(chunk) is None, "another tower encodes it otherwise"


def test_an_encoding_that_waits_for_the_store_is_known_to_every_former_on_it(engine, store, former):
    chunk, opened = picture(1), threading.Event()
    later_of(engine).add(lambda: opened.wait() and None)
    made = former.encodings.make(chunk, later=True)
    other = former_of(engine, store, system=[7, 8])
    waiting, stored = other.find(chunk), store.ls("encoding")
    opened.set()
    assert waiting is made and not stored
    later_of(engine).flush()
    read = other.find(chunk)
    assert read is not made and torch.equal(
        read.encoded.tensors["features"], made.encoded.tensors["features"]
    )
    assert len(store.ls("encoding")) == 1


def test_the_record_of_an_encoding_is_made_by_later_work(engine, former, monkeypatch):
    records, check = [], EncodingRecord.__post_init__
    monkeypatch.setattr(EncodingRecord, "__post_init__", lambda one: records.append(one) or check(one))
    opened = threading.Event()
    later_of(engine).add(lambda: opened.wait() and None)
    former.encodings.make(picture(1), later=True)
    early = len(records)
    opened.set()
    later_of(engine).flush()
    assert early == 0 < len(records)


# -- the computation ---------------------------------------------------------------------------


def test_a_model_that_has_changed_is_refused(engine, former):
    former.anchor.identity.check(engine)
    engine.fingerprint = "0" * 64
    with pytest.raises(IncompatibleChunk, match="another model"):
        former.anchor.identity.check(engine)
