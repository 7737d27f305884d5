"""Chats of a language model with real weights: what left is gone, what stayed is known."""

from __future__ import annotations

from typing import Any

import pytest

from kamera import ChatSession, ChunkStore, Directive
from tests.engines.compare import relative
from tests.models.smollm2 import (
    ASK_CAT,
    ASK_CODE,
    CHAT,
    CODE_SAID,
    MINKA,
    needs_smollm2,
    plain_of_chat,
    said,
    smollm2,
)

pytestmark = needs_smollm2

ROUNDING = 1e-4
GREEDY = {"max_new_tokens": 16, "do_sample": False}


def chat(**options: Any) -> ChatSession:
    return ChatSession(smollm2(), ChunkStore.open("memory://"), **options)


@pytest.mark.slow
def test_a_message_that_a_directive_removes_was_never_there():
    session = chat()
    assert session.send([*CHAT, ASK_CODE], **GREEDY).text == CODE_SAID
    session.edit([Directive(3, 5, unit="messages", mode="forget")])
    assert session.messages == [*CHAT[:3], ASK_CODE, said("assistant", CODE_SAID)]
    assert session.send(ASK_CAT, **GREEDY).text == MINKA
    session.edit([Directive(3, 5, unit="messages", mode="forget")])  # and its answer
    assert relative(
        session.next_token_logits([*CHAT[:3], ASK_CODE]), plain_of_chat([*CHAT[:3], ASK_CODE])
    ) <= (ROUNDING)
    assert "4711" not in session.send([*CHAT[:3], ASK_CODE], **GREEDY).text


def test_a_client_that_drops_its_old_turns_is_answered_exactly():
    """After the first departure the next one is prepared: only new tokens run before the answers."""
    session, history, ran = chat(), [*CHAT[:3]], list[int]()
    for number in (4711, 2084, 1963, 5520):
        history.append(said("user", f"The door code of house {number // 7} is {number}."))
        sent = [history[0], *history[1:][-5:]]
        turn = session.send(sent, max_new_tokens=1)
        session.flush()
        ran.append(turn.usage.prompt_tokens - turn.usage.cached_tokens)
        history.append(said("assistant", f"I will remember that the door code is {number}."))
    assert relative(session.next_token_logits(sent), plain_of_chat(sent)) <= ROUNDING
    whole = turn.usage.prompt_tokens
    assert ran[0] > 0.9 * whole * 3 / 5 and ran[-1] < 0.5 * whole, ran
    last = session.send([history[0], *history[-4:], ASK_CODE], **GREEDY)
    assert "5520" in last.text


def test_a_saved_chat_goes_on_without_running_its_history_again(tmp_path):
    session = chat()
    session.send([*CHAT, ASK_CODE], **GREEDY)
    session.save(tmp_path / "chat")
    loaded = ChatSession.load(tmp_path / "chat", smollm2(), ChunkStore.open("memory://"))
    turn = loaded.send(ASK_CAT, **GREEDY)
    assert turn.text == MINKA and turn.report.guarantee == "exact"
    assert turn.usage.prompt_tokens - turn.usage.cached_tokens < 0.4 * turn.usage.prompt_tokens
