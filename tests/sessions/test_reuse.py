"""A session with reuse on serves what is admitted, tells the tier of each segment, and answers the same."""

from __future__ import annotations

import pytest

from kamera import ChatSession, ChunkStore
from tests.sessions.rig import EXACT, FULL, plain_logits, session, speaking

TALK = [
    {"role": "user", "content": "one two three"},
    {"role": "assistant", "content": "four five six"},
    {"role": "user", "content": "seven eight nine"},
]
MOVED = [TALK[2], TALK[1], {"role": "user", "content": "ten"}]


def off(chat: ChatSession, messages) -> float:
    found, wanted = chat.next_token_logits(messages), plain_logits(chat.backbone, messages)
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("policy", [EXACT, FULL])
def test_reuse_changes_no_answer(policy):
    chat = session(speaking("headers"), policy, reuse=True)
    for messages in (TALK[:1], TALK, MOVED, TALK):
        assert off(chat, messages) < 1e-4
    assert {a.tier for a in chat.state.admissions} <= {"exact", "patched", "none"}
    assert [a.guarantee for a in chat.state.admissions] == [s.guarantee for s in chat.window.slots]
    assert session(speaking("headers"), policy).state.admissions == ()


def test_stored_segments_are_admitted_in_another_session():
    store = ChunkStore.open("memory://")
    first, second = (ChatSession(speaking("headers"), store, policy=FULL, reuse=True) for _ in range(2))
    first.next_token_logits(TALK)
    assert off(second, TALK) < 1e-4
    assert {a.tier for a in first.state.admissions} == {"none"}
    assert {a.tier for a in second.state.admissions} == {"exact", "patched"}
