"""With ``reuse`` a system prompt is content: what stands behind a header or a clock is found and served."""

from __future__ import annotations

import logging
import random

import pytest

from kamera import ChatSession, ChunkStore, ReusePolicy, SessionPool
from kamera.content import Conversations
from kamera.edits import policies
from tests.engines.compare import relative
from tests.sessions.rig import EXACT, FULL, plain_logits, speaking

GREEDY = {"max_new_tokens": 2, "do_sample": False}
DRAW = random.Random(0)
RULES = " ".join(
    DRAW.choice(("read", "write", "file", "lamp", "tag", "path", "left", "up")) for _ in range(160)
)
NEAR = ReusePolicy(minimum="near", max_divergence=1.0)


def agents() -> list[list[dict]]:
    """Requests of five agents: a name of its own in front of the same rules."""
    names = [f"You are agent {i}, called {DRAW.randrange(10**6)}. " for i in range(5)]
    return [
        [{"role": "system", "content": name + RULES}, {"role": "user", "content": f"question {i}?"}]
        for i, name in enumerate(names)
    ]


def clock() -> list[list[dict]]:
    """Turns of a conversation whose system prompt has the time in it."""
    asked, history = [], []
    for i in range(6):
        history = [*history, {"role": "user", "content": f"what of {i}?"}]
        asked.append([{"role": "system", "content": f"It is 12:0{i} now. {RULES}"}, *history])
        history = [*history, {"role": "assistant", "content": "ok"}]
    return asked


def ran(pool: SessionPool, asked: list, session_id: str | None = None) -> list[float]:
    """The share of each prompt's tokens that ran."""
    shares = []
    for messages in asked:
        turn = pool.send(messages, session_id, **GREEDY)
        pool.flush()
        shares.append(turn.report.tokens_recomputed / turn.usage.prompt_tokens)
    return shares


def pool_of(policy: ReusePolicy | None = None, reuse: bool = True) -> SessionPool:
    return SessionPool(speaking("headers"), ChunkStore.open("memory://"), policy=policy, reuse=reuse)


@pytest.mark.parametrize("policy", [NEAR, ReusePolicy(minimum="blind")], ids=["near", "blind"])
def test_what_stands_behind_another_header_is_served_where_a_policy_says_so(policy):
    assert max(ran(pool_of(policy), agents())[2:]) <= 0.2
    assert min(ran(pool_of(policy, reuse=False), agents())) >= 0.95


def test_a_turn_with_another_time_in_its_system_prompt_runs_what_is_new():
    assert max(ran(pool_of(), clock(), "one")[2:]) <= 0.05
    assert max(ran(pool_of(NEAR), clock())[2:]) <= 0.4
    assert min(ran(pool_of(reuse=False), clock(), "one")) >= 0.95


@pytest.mark.parametrize("policy", [EXACT, FULL], ids=["exact", "full rank"])
def test_under_a_strict_policy_answers_are_the_plain_models(policy):
    pool = pool_of(policy)
    for messages in (*agents()[:2], *clock()[:3], *agents()[:2]):
        turn = pool.send(messages, **GREEDY)
        inputs = Conversations(pool.backbone.processor).whole(messages)
        (want,) = pool.backbone.plain.generate(inputs, **GREEDY)
        assert list(turn.token_ids) == want.tolist()
        branch = pool.session(turn.session_id)
        assert relative(branch.next_token_logits(messages), plain_logits(pool.backbone, messages)) <= 1e-4
        pool.flush()


def test_a_session_is_of_its_system_prompt_alone_and_comes_back_from_a_file(tmp_path):
    backbone, store = speaking("headers"), ChunkStore.open("memory://")
    pool = SessionPool(backbone, store, policy=NEAR, reuse=True)
    names = {pool.send(messages, **GREEDY).session_id for messages in agents()}
    assert len(names) == 5
    chat = ChatSession(backbone, store, policy=EXACT, reuse=True)
    chat.send(agents()[0], **GREEDY)
    chat.save(tmp_path / "s")
    again = ChatSession.load(tmp_path / "s", backbone, store, reuse=True)
    for session in (chat, again):
        assert session.send("and more?", **GREEDY).report.kept > 800
    assert relative(again.next_token_logits(), chat.next_token_logits()) <= 1e-4


def test_a_line_of_the_log_says_how_a_request_was_matched_and_what_was_served(caplog):
    pool, (first, *others) = pool_of(NEAR), agents()
    with caplog.at_level(logging.INFO, logger="kamera.sessions"):
        ran(pool, [first, *others[:2]])
        pool.send("more", pool.send(first, **GREEDY).session_id, **GREEDY)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split()[2].rstrip(":") for line in lines] == [
        "opened",
        "opened",
        "opened",
        "by_prefix",
        "by_id",
    ]
    assert "prefilled: no copy is stored" in lines[0] and " near" not in lines[0] and " near" in lines[2]
    assert not any(word in line for line in lines for word in ("agent", "lamp", "question"))


def test_the_log_tells_a_system_prompt_a_prefix_an_edit_and_nothing_apart(caplog):
    pool = SessionPool(speaking("headers"), ChunkStore.open("memory://"), min_tokens=20, anticipates=False)
    system = {"role": "system", "content": "You read the reports of a station. " * 5}
    said = [f"Report {number} tells of {number * 37} crates and of a late boat. " * 4 for number in range(4)]
    notes = [{"role": "user", "content": text} for text in said]
    with caplog.at_level(logging.INFO, logger="kamera.sessions"):
        for asked in ([notes[0]], [notes[1]], [notes[1], *notes[2:]], [*notes[2:]]):
            turn = pool.send([system, *asked], **GREEDY)
    lines = [record.getMessage().partition(" ")[2].partition(" ")[2] for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [
        "opened on nothing known",
        "opened on a known system prompt",
        "by_prefix",
        "by_edit",
    ]
    assert " 0 of " in lines[0] and " 0 of " not in "".join(lines[1:])
    assert f"{turn.usage.cached_tokens} of {turn.usage.prompt_tokens} tokens at hand" in lines[-1]
    assert turn.usage.cached_tokens > 150


def test_a_departure_is_prepared_behind_texts_that_were_cut_anew(caplog):
    chat = ChatSession(
        speaking("headers"), ChunkStore.open("memory://"), reuse=True, edit_policy=policies.keep_ends(0, 3)
    )
    for number in range(5):
        turn = chat.send(f"Case {number * 37}, page {number}. {RULES[:400]}", **GREEDY)
        chat.flush()
    assert chat.state.layout.prompt.cuts and turn.report.anticipated
    assert "background work failed" not in caplog.text
