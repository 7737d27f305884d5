"""Leyline's verbs on spans of a session: evict, share and pin."""

from __future__ import annotations

import pytest

from kamera import ChatSession, ChunkStore, ReusePolicy
from kamera.errors import InvalidDirective, StoreError, UnknownChunk
from kamera.store import StoreAdmin
from tests.content.templates import picture
from tests.sessions.rig import EXACT, plain_logits, seeing, speaking

LONG = "The lamp on the desk is green and the door behind it is open. " * 6


def told(store: ChunkStore, policy: ReusePolicy = EXACT) -> ChatSession:
    session = ChatSession(speaking("headers"), store, policy=policy)
    for text in (LONG, "What is open?", "And the lamp?"):
        session.send(text, max_new_tokens=2)
    return session


def test_an_evicted_span_is_as_if_it_had_never_been():
    session = told(ChunkStore.open("memory://"))
    before = session.messages
    session.evict((2, 4))
    assert session.messages == [*before[:2], *before[4:]]
    question = [*session.messages, {"role": "user", "content": "So?"}]
    expected = plain_logits(session.backbone, question)
    assert session.next_token_logits(question).allclose(expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pins", [True, False])
def test_a_pinned_span_stays_where_the_rest_is_collected(tmp_path, pins):
    with ChunkStore.open(tmp_path) as store:
        session = told(store)
        kept = session.pin((0, 1), ttl="1h") if pins else session.share((0, 1))
        assert kept and {info.chunk_id for info in store.ls("canonical")} >= set(kept)
        StoreAdmin(store).gc(0)
        left = {info.chunk_id for info in store.ls("canonical")}
        assert left == (set(kept) if pins else set())
        assert session.send("still there?", max_new_tokens=2).report.guarantee == "exact"


def test_what_was_shared_is_recalled_by_another_session_without_an_encode():
    store, backbone = ChunkStore.open("memory://"), seeing()
    first, other = (ChatSession(backbone, store, policy=EXACT) for _ in range(2))
    look = [{"type": "image", "image": picture(3)}, {"type": "text", "text": LONG}]
    first.send([{"role": "user", "content": look}], max_new_tokens=2)
    other.send("What do you know?", max_new_tokens=2)
    seen = [slot.chunk_id for slot in first.window.slots]
    with pytest.raises(UnknownChunk):
        other.window.recall(seen[0])
    assert first.share((0, 1)) == tuple(seen)
    report = other.window.recall(seen[0])
    assert report.vision_encodes == 0 and report.slot.chunk_id == seen[0]


def test_a_span_that_is_not_there_is_refused_and_nothing_is_pinned(tmp_path):
    with ChunkStore.open(tmp_path) as store:
        empty = ChatSession(speaking("headers"), store)
        with pytest.raises(InvalidDirective, match="no turn was sent"):
            empty.pin((0, 0))
        session = told(store)
        with pytest.raises(InvalidDirective, match="end at 6"):
            session.pin((0, 9))
        assert StoreAdmin(store).pins.list() == []


@pytest.mark.parametrize("verb", ["share", "pin"])
def test_what_the_store_has_no_room_for_is_said(verb):
    session = told(ChunkStore.open("memory://", memory_limit=64))
    with pytest.raises(StoreError, match="of 0:1 are not in memory://"):
        getattr(session, verb)((0, 1))
    assert session.send("still there?", max_new_tokens=2).report.guarantee == "exact"
