"""Canonicals of one context, and the facts of chunks: read if stored, else computed and stored."""

from __future__ import annotations

import pytest
import torch

from kamera.errors import IncompatibleChunk, StoreError, UnknownChunk
from kamera.patches import Losses, keep_patch, put_owed
from kamera.store import ChunkStore, Put
from tests.engines.compare import worst
from tests.patches.engine import (
    SmallEngine,
    behind_all,
    conditioned,
    former_of,
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


def test_another_model_or_anchor_computes_its_own(engine, store, former):
    former.canonical(A)
    for other in (former_of(engine, store, system=[7, 8]), former_of(SmallEngine("0" * 64, seed=9), store)):
        before = other.backbone.done.forwards
        other.canonical(A)
        assert other.backbone.done.forwards == before + 1


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


# -- chunks ------------------------------------------------------------------------------------


def test_an_unknown_chunk_and_that_of_another_model_are_refused_by_name(store, former):
    with pytest.raises(UnknownChunk, match="no chunk 'none'"):
        former.facts_of("none")
    former.canonical(A)
    other = former_of(SmallEngine("0" * 64), store)
    with pytest.raises(IncompatibleChunk, match="archived by backbone ffffffffffff"):
        other.facts_of(A.chunk_id)


# -- the computation ---------------------------------------------------------------------------
