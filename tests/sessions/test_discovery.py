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


def equal_runs(text: list[int], earlier: list[list[int]], least: int) -> set[int]:
    """Tokens of a text that stand in a run of ``least`` or more that some earlier text has. Slow, obvious."""
    known = {tuple(old[i : i + least]) for old in earlier for i in range(len(old) - least + 1)}
    found: set[int] = set()
    for i in range(len(text) - least + 1):
        if tuple(text[i : i + least]) in known:
            found |= {*range(i, i + least)}
    return found


@pytest.mark.parametrize("seed", range(3))
def test_every_long_run_that_came_before_is_a_segment_of_its_own(seed):
    """Against a plain search: no segment holds both tokens of such a run and tokens that are new."""
    rng = random.Random(seed)
    parts = [words(100 + n, rng.randint(70, 200)) for n in range(4)]
    one, earlier = pool(), list[list[int]]()
    for _ in range(5):
        made = [words(rng.randrange(10**6), rng.randint(5, 60)), *rng.sample(parts, 3)]
        turn = one.send(told("".join(made)), **GREEDY)
        one.flush()
        prompt = one.session(turn.session_id).state.layout.prompt
        for start, stop in prompt.texts:
            text = prompt.ids[start:stop].tolist()
            came = {start + i for i in equal_runs(text, earlier, 63)}
            inside = [s for s in prompt.segments if start <= s.start < stop]
            mixed = [s for s in inside if 0 < len(came & {*range(s.start, s.stop)}) < s.num_tokens]
            new = [s for s in mixed if not equal_runs(prompt.tokens(s).tolist(), earlier, s.num_tokens)]
            assert all(len(came & {*range(s.start, s.stop)}) < 16 for s in new), "less than a part"
        earlier += [prompt.ids[start:stop].tolist() for start, stop in prompt.texts]
        assert [s.start for s in prompt.segments[1:]] == [s.stop for s in prompt.segments[:-1]]


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


def grown(chat: ChatSession, messages: Messages, text: str) -> Messages:
    return [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "and now?"}]


@pytest.mark.parametrize("parted", [True, False], ids=["cut anew", "as rendered"])
def test_a_saved_session_keeps_its_cuts_whatever_others_bring(tmp_path, parted):
    """Loaded on a store that knows other parts of the same text, it prefills only what is new."""
    backbone, store = speaking("headers"), ChunkStore.open("memory://")
    if parted:
        ChatSession(backbone, store, policy=SAMPLED, reuse=True).send(told(words(60, 30)), **GREEDY)
    chat = ChatSession(backbone, store, policy=SAMPLED, reuse=True)
    first = told(words(61, 60), footer=words(62, 80))
    turn = chat.send(first, **GREEDY)
    assert bool(chat.state.layout.prompt.cuts) == parted
    chat.save(tmp_path / "one")
    others = ChunkStore.open("memory://")
    other = ChatSession(backbone, others, policy=SAMPLED, reuse=True)
    other.send(told(words(63, 30), DOCUMENT[50:333], words(64, 30)), **GREEDY)
    again = ChatSession.load(tmp_path / "one", backbone, others, reuse=True)
    assert again.state.layout.prompt.cuts == chat.state.layout.prompt.cuts
    report = again.send(grown(chat, first, turn.text), **GREEDY).report
    assert report.prefilled < 80 and report.kept > 500
    assert again.prompt_ids.tolist() == rendered_ids(again, grown(chat, first, turn.text))


def test_a_pool_finds_the_session_of_a_prompt_whatever_its_cuts():
    one = pool(min_tokens=100)
    one.send(told(words(70, 30)), session_id="other", **GREEDY)
    first = told(words(71, 60), footer=words(72, 80))
    turn = one.send(first, **GREEDY)
    assert one.session(turn.session_id).state.layout.prompt.cuts
    after = one.send(grown(one.session(turn.session_id), first, turn.text), **GREEDY)
    assert after.session_id == turn.session_id and one.metrics().by_prefix == 1
    assert after.report.prefilled < 80
