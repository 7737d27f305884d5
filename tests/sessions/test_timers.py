"""Spans that decay, and pins that end, after so many turns or seconds of a session."""

from __future__ import annotations

import pytest
import torch

from kamera import ChunkStore
from kamera.edits import Decay, Pin
from kamera.errors import InvalidDirective, StoreError
from kamera.sessions import ChatSession
from kamera.sessions.timers import Timer
from kamera.store import StoreAdmin
from tests.content.templates import TALK
from tests.sessions.rig import EXACT, plain_logits, speaking

GREEDY = {"max_new_tokens": 2, "do_sample": False}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store(tmp_path):
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


def _chat(store, clock=None) -> ChatSession:
    options = {} if clock is None else {"clock": clock}
    chat = ChatSession(speaking("headers"), store, policy=EXACT, **options)
    chat.send(TALK, **GREEDY)
    return chat


def _in_memory(store, chunks) -> int:
    memory = store._tiers.memory
    return sum(info.chunk_id in chunks for info in memory.infos())


def test_a_span_decays_after_its_turns_and_not_before(store):
    chat = _chat(store)
    report = chat.apply(Decay(0, 1, turns=2))
    assert report.objects == 0 and _in_memory(store, report.chunks) > 0
    assert chat.send("one", **GREEDY).report.notes == () and _in_memory(store, report.chunks) > 0
    (note,) = chat.send("two", **GREEDY).report.notes
    assert note.startswith("decay: ") and _in_memory(store, report.chunks) == 0
    assert {i.chunk_id for i in store.ls("canonical")} >= set(report.chunks)  # the directory has them
    assert chat.send("three", **GREEDY).report.notes == ()


def test_a_span_decays_at_the_first_answer_after_its_seconds(store):
    clock = Clock()
    chat = _chat(store, clock)
    report = chat.apply(Decay(0, 1, turns=50, seconds=30.0))
    clock.now += 29.9
    chat.send("early", **GREEDY)
    assert _in_memory(store, report.chunks) > 0
    clock.now += 0.1
    chat.send("late", **GREEDY)
    assert _in_memory(store, report.chunks) == 0


def test_a_pin_ends_after_its_turns(store):
    chat = _chat(store)
    report = chat.apply(Pin(0, 1, turns=1))
    assert len(StoreAdmin(store).pins.list()) == report.objects > 0
    chat.send("one", **GREEDY)
    assert StoreAdmin(store).pins.list() == []


def test_a_timer_changes_no_answer_and_fails_none(store, monkeypatch):
    chat = _chat(store)
    chat.apply(Decay(0, 1, turns=1))

    def fails(self, names):
        raise StoreError("no disk")

    with monkeypatch.context() as patch:
        patch.setattr("kamera.store.admin.raw.RawObjects.demote", fails)
        (note,) = chat.send("one", **GREEDY).report.notes
    assert note == "decay is tried again: no disk"
    assert chat.send("two", **GREEDY).report.notes[0].startswith("decay: ")
    wanted = plain_logits(chat.backbone, chat.messages)
    torch.testing.assert_close(chat.next_token_logits(), wanted, rtol=1e-3, atol=1e-3)


def test_a_failed_answer_and_a_fork_do_not_run_the_timers_of_others(store):
    chat = _chat(store)
    report = chat.apply(Decay(0, 1, turns=1))
    with pytest.raises(ValueError):
        chat.send("one", max_new_tokens=0)
    assert _in_memory(store, report.chunks) > 0
    branch = chat.fork()
    chat.send("one", **GREEDY)
    assert _in_memory(store, report.chunks) == 0 and len(branch._state.timers) == 1


def test_timers_are_saved_with_their_session(store, tmp_path):
    clock = Clock()
    chat = _chat(store, clock)
    report = chat.apply(Decay(0, 1, turns=2, seconds=60.0))
    chat.save(tmp_path / "s")
    again = ChatSession.load(tmp_path / "s", chat.backbone, store, clock=clock)
    assert again._state.timers == (report.timer,) == (Timer("decay", report.chunks, 3, 1060.0),)
    clock.now += 60
    assert again.send("one", **GREEDY).report.notes[0].startswith("decay: ")


@pytest.mark.parametrize(
    "verb", [lambda: Decay(0, 1, turns=0), lambda: Decay(0, 1, seconds=-1.0), lambda: Pin(0, 1, ttl=0)]
)
def test_a_limit_that_is_none_is_refused(verb):
    with pytest.raises(InvalidDirective, match="more than 0"):
        verb()
