"""Verbs: what becomes of a span's stored objects, and messages that one answer alone sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kamera import ChunkStore
from kamera.edits import Decay, Evict, Pin, Share
from kamera.errors import IncompatibleChunk, InvalidDirective, PinsFull
from kamera.sessions import ChatSession
from kamera.store import StoreAdmin
from tests.content.templates import screens
from tests.engines.compare import relative
from tests.sessions.rig import EXACT, FULL, plain_logits, seeing, session

GREEDY = {"max_new_tokens": 2, "do_sample": False}
NOTE = [{"role": "assistant", "content": "thinking of many things"}, {"role": "user", "content": "go on"}]


def _chat(store, messages, policy=EXACT, **options) -> ChatSession:
    chat = ChatSession(seeing(), store, policy=policy, **options)
    chat.send(messages, **GREEDY)
    return chat


def _keys(store, chunks) -> set[str]:
    return {info.key for chunk in chunks for info in store.ls(chunk_id=chunk)}


def test_pinned_chunks_survive_a_full_collection(tmp_path):
    with ChunkStore.open(tmp_path) as store:
        chat = _chat(store, screens(3))
        report = chat.apply(Pin(1, 2))
        StoreAdmin(store).gc(max_bytes=0)
        kept = _keys(store, report.chunks)
        assert len(kept) == report.objects > 0
        assert {info.kind for info in store.ls() if info.key in kept} >= {"canonical", "encoding"}
        assert {info.key for info in store.ls() if info.kind != "anchor"} == kept


def test_a_pin_over_the_cap_is_refused_and_pins_nothing(tmp_path):
    with ChunkStore.open(tmp_path) as store:
        chat = _chat(store, screens(3))
        StoreAdmin(store).pins.set_cap(10)
        before = chat.next_token_logits()
        with pytest.raises(PinsFull, match="cap"):
            chat.apply(Pin(1, 2))
        assert StoreAdmin(store).pins.list() == [] and torch.equal(chat.next_token_logits(), before)


def test_a_pin_ends_with_its_time(tmp_path):
    with ChunkStore.open(tmp_path) as store:
        chat = _chat(store, screens(2))
        chat.apply(Pin(1, 2, ttl=1e-9))
        StoreAdmin(store).gc(max_bytes=0)
        assert [info for info in store.ls() if info.kind == "canonical"] == []


def test_a_pin_for_no_time_is_refused():
    with pytest.raises(InvalidDirective, match="more than 0"):
        Pin(0, 1, ttl=0)


def test_decayed_chunks_leave_memory_for_the_directory(tmp_path):
    with ChunkStore.open(tmp_path) as store:
        chat = _chat(store, screens(3))
        chat.flush()
        before = StoreAdmin(store).stats().memory.bytes
        chat.apply(Pin(1, 6))  # all are archived
        held = StoreAdmin(store).stats().memory
        report = chat.apply(Decay(1, 2))
        after = StoreAdmin(store).stats().memory
        assert after.objects < held.objects and after.bytes < held.bytes and before > 0
        assert _keys(store, report.chunks) and report.objects == held.objects - after.objects
        report = chat.send(screens(3)[2:], **GREEDY).report
        assert chat.send(screens(3), **GREEDY).report.vision_encodes == 0  # read from the directory


def test_decayed_chunks_are_the_first_that_memory_evicts():
    def archived(limit):
        store = ChunkStore.open("memory://", memory_limit=limit)
        chat = _chat(store, screens(2))
        chat.apply(Share(1, 4))
        return store, chat

    filled = StoreAdmin(archived("1GiB")[0]).stats().memory.bytes
    store, chat = archived(filled + 1_000)
    before = {info.key for info in store.ls()}
    decayed = _keys(store, chat.apply(Decay(3, 4)).chunks)
    (anchor,) = store.ls("anchor")
    record = store.get_anchor(anchor.context)
    store.put(replace(record, chunk_id="0" * 64, kind="canonical"))  # anything new
    gone = before - {info.key for info in store.ls()}
    assert gone and gone <= decayed < before


def test_evicted_spans_leave_the_prompt_and_come_back_without_an_encode():
    chat = session(seeing())
    chat.send(screens(3), **GREEDY)
    whole = chat.messages
    report = chat.apply(Evict(1, 3))
    assert report.turn.left > 20 and chat.messages == [whole[0], *whole[3:]]
    assert relative(chat.next_token_logits(), plain_logits(seeing(), chat.messages)) <= 1e-4
    assert chat.send(whole, **GREEDY).report.vision_encodes == 0


@pytest.mark.parametrize("shares", [False, True])
def test_a_shared_picture_costs_another_tenant_no_encode(tmp_path, shares):
    with (
        ChunkStore.open(tmp_path, tenant="ann", secret=b"a" * 16) as mine,
        ChunkStore.open(tmp_path, tenant="ben", secret=b"b" * 16) as theirs,
    ):
        chat = _chat(mine, screens(2), FULL, mode="repair")
        if shares:
            report = chat.apply(Share(1, 2, scope=theirs))
            assert report.objects >= 3 and theirs.ls("exact") == [] != mine.ls("exact")
            assert {info.chunk_id for info in theirs.ls()} == set(report.chunks)
        first = ChatSession(seeing(), theirs, policy=FULL).send(screens(1)[:2], **GREEDY).report
        assert first.vision_encodes == (0 if shares else 1)


def test_shared_with_the_tenant_is_stored_at_once():
    store = ChunkStore.open("memory://")
    chat = ChatSession(seeing(), store, policy=EXACT)
    chat.send(screens(2), **GREEDY)
    report = chat.apply(Share(1, 4))
    assert {info.chunk_id for info in store.ls("canonical")} >= set(report.chunks)


def test_a_store_of_another_form_takes_no_share():
    chat = session(seeing())
    chat.send(screens(1), **GREEDY)
    with pytest.raises(IncompatibleChunk, match="kv='as-is'"):
        chat.apply(Share(1, 2, scope=ChunkStore.open("memory://", kv="int8")))


@pytest.mark.parametrize("verb", [Pin(0, 1), Decay(5, 6)])
def test_a_span_outside_of_the_window_is_refused(verb):
    chat = session(seeing())
    with pytest.raises(InvalidDirective, match="send messages first"):
        chat.apply(verb)
    chat.send(screens(1), **GREEDY)
    with pytest.raises(InvalidDirective):
        chat.apply(verb)


@pytest.mark.parametrize("mode", ["amortize", "forget"])
def test_scratch_is_attended_and_leaves_no_trace(mode):
    policy = EXACT if mode == "forget" else FULL
    with_it, without, other, fourth = (session(seeing(), policy, mode=mode) for _ in range(4))
    assert with_it.send(screens(2), **GREEDY).text == without.send(screens(2), **GREEDY).text
    whole = [*with_it.messages, {"role": "user", "content": "what now?"}]
    seen = other.next_token_logits([*whole, *NOTE])
    longer = {"max_new_tokens": 8, "do_sample": False}
    turn = with_it.send(whole, scratch=NOTE, **longer)
    said = [chat.send(m, **longer).text for chat, m in ((other, [*whole, *NOTE]), (fourth, whole))]
    assert said[0] == turn.text != said[1]
    unseen = without.next_token_logits(whole)
    assert relative(seen, unseen) > 1e-3  # it was attended
    assert [s.chunk_id for s in with_it.window.slots] == [s.chunk_id for s in without.window.slots]
    said = [*whole, {"role": "assistant", "content": turn.text}]
    assert with_it.messages == said
    after = [*said, {"role": "user", "content": "and then?"}]
    assert torch.equal(with_it.next_token_logits(after), without.next_token_logits(after))
    one, two = with_it.window, without.window
    assert [s.chunk_id for s in one.slots] == [s.chunk_id for s in two.slots]
    for mine, theirs in zip(one.slots, two.slots, strict=True):
        for a, b in zip(one.kv(mine), two.kv(theirs), strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)


def test_scratch_of_an_answer_that_fails_leaves_nothing():
    chat = session(seeing())
    chat.send(screens(1), **GREEDY)
    before, slots = chat.messages, chat.window.slots
    with pytest.raises(ValueError):
        chat.send("now?", scratch=NOTE, max_new_tokens=0)
    assert chat.messages == before and chat.window.slots == slots
