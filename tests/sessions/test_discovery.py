"""What came before in any conversation of a tenant is found where it moved, and served as far as admitted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kamera import ChatSession, ChunkStore, ReusePolicy
from kamera.content import Conversations
from kamera.sessions import SessionPool
from tests.sessions.rig import EXACT, Messages, plain_logits, speaking
from tests.window.rig import borne, watching

SAMPLED = ReusePolicy(minimum="sampled", share=0.25, max_error=1.0, audit=0.0)
REFUSED = replace(SAMPLED, max_error=1e-6)
"""No text's tokens leave so little open: all is found, and all is prefilled."""
GREEDY = {"max_new_tokens": 2, "do_sample": False}
APART = 10_000
"""More tokens than any two prompts share: each request opens a session."""


def words(seed: int, count: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=count)).strip()


DOCUMENT = words(1, 400)


def told(header: str, document: str = DOCUMENT, footer: str = "") -> Messages:
    return [{"role": "user", "content": f"{header}{document}{footer}"}]


def pool(policy: ReusePolicy = SAMPLED, store=None, **options) -> SessionPool:
    given = ChunkStore.open("memory://") if store is None else store
    options = {"reuse": True, "min_tokens": APART, "anticipates": False} | options
    return SessionPool(speaking("headers"), given, policy=policy, **options)


def off(chat: ChatSession, messages: Messages) -> float:
    found, wanted = chat.next_token_logits(messages), plain_logits(chat.backbone, messages)
    return float((found - wanted).norm() / wanted.norm())


def rendered_ids(chat: ChatSession, messages: Messages) -> list[int]:
    return Conversations(chat.backbone.processor).render(messages).ids.tolist()


def test_a_document_behind_another_header_is_served_and_counted_as_hooks_count():
    one = pool()
    with watching(one.backbone, later=True) as seen:
        for number in range(4):
            turn = one.send(told(words(10 + number, 40)), **GREEDY)
            one.flush()
    assert borne(seen, one.usage())
    chat = one.session(turn.session_id)
    served = [a for a in chat.state.admissions if a.tier == "sampled"]
    assert sum(a.tokens for a in served) > 0.9 * len(DOCUMENT)
    assert all("tokens run for this left context" in a.reason for a in served)
    assert turn.report.admissions == chat.state.admissions
    assert turn.report.sampled > 0.6 * len(DOCUMENT)
    assert chat.prompt_ids.tolist() == rendered_ids(chat, told(words(13, 40)))


@pytest.mark.parametrize("policy", [EXACT, REFUSED], ids=["exact", "refused"])
def test_what_is_found_and_not_served_answers_as_the_plain_model(policy):
    store = ChunkStore.open("memory://")
    for number in range(3):
        chat = ChatSession(speaking("headers"), store, policy=policy, reuse=True)
        assert off(chat, told(words(20 + number, 30 + number))) < 1e-4
        chat.flush()
    reasons = [a.reason for a in chat.state.admissions]
    assert any("stored, but not for this left context" in why for why in reasons) == (policy is REFUSED)


def test_a_tenant_finds_nothing_of_another():
    stores = {name: ChunkStore.open("memory://", tenant=name) for name in ("a", "b")}
    one = pool(store=stores.__getitem__)
    for number in range(3):
        one.send(told(words(40 + number, 40)), tenant="a", **GREEDY)
        one.flush()
    name = one.send(told(words(44, 40)), tenant="b", **GREEDY).session_id
    chat = one.session(name, "b")
    assert {a.tier for a in chat.state.admissions} == {"none"}
    assert not any("came before" in a.reason for a in chat.state.admissions)
    assert not chat.state.layout.prompt.cuts
    mine = one.send(told(words(44, 40)), tenant="a", **GREEDY).session_id
    assert "sampled" in {a.tier for a in one.session(mine, "a").state.admissions}


@pytest.mark.parametrize("mode", ["auto", "repair"])
def test_an_answer_never_depends_on_what_another_conversation_dropped(mode):
    """Two worlds of equal cuts that differ in a secret in front of the document, which was dropped."""
    logits = []
    for secret in (words(80, 90), words(81, 90)):
        one = pool(mode=mode)
        for number in range(3):
            asked = told(words(82 + number, 20))
            known = [{"role": "user", "content": secret}, {"role": "assistant", "content": "yes"}]
            turn = one.send([*known, *asked], **GREEDY)
            said = {"role": "assistant", "content": turn.text}
            rest = [*asked, said, {"role": "user", "content": "next"}]
            one.send(rest, turn.session_id, **GREEDY)
            one.flush()
        chat = one.session(one.send(told(words(90, 40)), **GREEDY).session_id)
        assert "sampled" in {a.tier for a in chat.state.admissions}
        logits.append(chat.next_token_logits())
    assert torch.equal(*logits)
