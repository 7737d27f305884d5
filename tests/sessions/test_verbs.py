"""Leyline's verbs on spans of a session: evict, decay, share and pin."""

from __future__ import annotations

import pytest

from kamera import ChatSession, ChunkStore, Directive, ReusePolicy
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


def test_a_span_decays_after_so_many_turns_as_if_it_had_never_been_and_stays_in_the_history():
    session = told(ChunkStore.open("memory://"))
    session.decay((2, 4), turns=1)
    session.send("And now?", max_new_tokens=2)
    assert len(session.prompt_ids) == prompt_tokens(session, session.messages[:-1])
    session.send("Later?", max_new_tokens=2)
    history = session.messages
    left = [*history[:2], *history[4:]]
    assert len(session.prompt_ids) == prompt_tokens(session, left[:-1])
    question = [*history, {"role": "user", "content": "So?"}]
    expected = plain_logits(session.backbone, [*left, question[-1]])
    assert session.next_token_logits(question).allclose(expected, rtol=1e-4, atol=1e-4)


def prompt_tokens(session: ChatSession, messages) -> int:
    return session._conversations.render(messages).num_tokens


@pytest.mark.parametrize("touch", ["decay", "pin", "edit"])
def test_what_is_touched_before_its_time_stays(touch):
    session = told(ChunkStore.open("memory://"))
    session.decay((0, 2), turns=1)
    if touch == "decay":
        session.decay((0, 2), turns=9)
    elif touch == "pin":
        session.pin((0, 1))
    history = session.messages
    history[0] = {"role": "user", "content": "other words"} if touch == "edit" else history[0]
    for _ in range(3):
        history = [*history, {"role": "user", "content": "And now?"}]
        session.send(history, max_new_tokens=2)
        assert len(session.prompt_ids) == prompt_tokens(session, history)
        history = session.messages


def test_a_decay_follows_its_messages_through_edits_forks_and_files(tmp_path):
    with ChunkStore.open(tmp_path / "store") as store:
        session = told(store)
        session.decay((2, 4), turns=2, replacement="(old)")
        fork = session.fork()
        session.evict((0, 2))
        session.flush()
        session.save(tmp_path / "saved")
        loaded = ChatSession.load(tmp_path / "saved", session.backbone, store)
        for each, start in ((session, 0), (loaded, 0), (fork, 2)):
            for text in ("one", "two", "three"):
                each.send(text, max_new_tokens=2)
            shown = each.messages[:-1]
            shown[start : start + 2] = [{**shown[start], "content": "(old)"}]
            assert each.prompt_ids.tolist() == each._conversations.render(shown).ids.tolist()


def test_seconds_pass_as_turns_do_and_a_survivor_shows_what_decayed_under_amortize():
    session = told(ChunkStore.open("memory://"), ReusePolicy(minimum="survivor"))
    session.decay((0, 2), ttl=0, mode="amortize")
    report = session.send("And now?", max_new_tokens=2).report
    assert report.left > 10 and report.guarantee == "survivor"


@pytest.mark.parametrize(
    ("span", "options", "says"),
    [
        ((2, 4), {}, "no end"),
        ((2, 4), {"turns": -1}, "turns -1"),
        ((2, 9), {"turns": 1}, "end at 6"),
        ((0, 6), {"turns": 1}, "no message"),
    ],
)
def test_a_decay_that_makes_no_sense_is_refused_and_nothing_changes(span, options, says):
    session = told(ChunkStore.open("memory://"))
    with pytest.raises(InvalidDirective, match=says):
        session.decay(span, **options)
    assert session.state.decays == ()


def test_directives_of_a_turn_share_and_pin_or_the_turn_has_not_been(tmp_path):
    with ChunkStore.open(tmp_path) as store:
        session = told(store)
        before = session.messages
        keep = [Directive(0, 1, verb="pin", unit="messages", seconds=60), Directive(2, 4, unit="messages")]
        session.send("So?", directives=keep, max_new_tokens=2)
        assert session.messages[:5] == [*before[:2], *before[4:], {"role": "user", "content": "So?"}]
        pinned = {pin.name for pin in StoreAdmin(store).pins.list()}
        assert pinned
    full = told(ChunkStore.open("memory://", memory_limit=64))
    before = full.messages
    with pytest.raises(StoreError, match="share again"):
        full.send("So?", directives=[Directive(0, 1, verb="share", unit="messages")], max_new_tokens=2)
    assert full.messages == before
