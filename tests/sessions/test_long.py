"""Long histories, and one request again and again from other states of the cache."""

from __future__ import annotations

import random

import pytest

from kamera import ChunkStore
from kamera.engines.hf import HfEngine
from kamera.sessions import SessionPool
from kamera.sessions.modes import OF_THE_PROMPT
from tests.engines.compare import relative
from tests.sessions.rig import EXACT, FULL, plain_logits, session, speaking

GREEDY = {"max_new_tokens": 1, "do_sample": False}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.slow
def test_a_history_of_200_turns_is_kept_in_place_and_any_turn_of_it_is_gone_on_from():
    short = speaking.__wrapped__("headers")
    short.model.config.max_position_embeddings = 1 << 14
    chat = session(HfEngine(short.model, short.processor))
    turns = [chat.send(f"number {i}", **GREEDY) for i in range(200)]
    assert max(turn.report.prefilled for turn in turns[1:]) < 40 and len(chat.messages) == 400
    wanted = plain_logits(chat.backbone, [*chat.messages, user("which?")])
    assert relative(chat.next_token_logits("which?"), wanted) <= 1e-4
    for number in (0, 99, 198):
        there = chat.history(turns[number].turn_id)
        assert there == chat.fork().messages[: len(there)] and len(there) == 2 * number + 2
        branch = chat.fork()
        turn = branch.send("which?", after=turns[number].turn_id, **GREEDY)
        assert turn.report.prefilled < 40
        wanted = plain_logits(chat.backbone, [*branch.messages, user("why?")])
        assert relative(branch.next_token_logits("why?"), wanted) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "mode"), [(EXACT, "auto"), (FULL, "repair"), (FULL, "amortize")])
def test_200_equal_requests_are_answered_equally_or_name_the_guarantee_that_differs(policy, mode):
    of = SessionPool(
        speaking("headers"), ChunkStore.open("memory://"), policy=policy, mode=mode, min_tokens=1
    )
    asked = [user(f"part {i}") for i in range(4)] + [user("so what is it?")]
    rng, texts, guarantees = random.Random(0), set(), set()
    for number in range(200):
        before = rng.sample(asked[:-1], rng.randint(1, 4))  # another order, another end, some parts alone
        of.send([*before, user(f"else {number % 7}")], f"other {number % 3}", **GREEDY)
        turn = of.send(
            asked, f"other {number % 3}" if number % 2 else None, max_new_tokens=4, do_sample=False
        )
        guarantees.add(turn.report.guarantee)
        if turn.report.guarantee in OF_THE_PROMPT:
            texts.add(turn.text)
    assert len(texts) == 1 and len(guarantees) > (mode != "auto")
    assert guarantees <= OF_THE_PROMPT or mode == "amortize"


def test_equal_requests_with_equal_seeds_are_equal_from_other_states_of_the_cache():
    of = SessionPool(speaking("headers"), ChunkStore.open("memory://"), policy=EXACT, min_tokens=1)
    drawn = {"max_new_tokens": 8, "temperature": 2.0}
    asked = [user("part 1"), user("part 2")]
    texts = []
    for seed, before in ((5, asked[:1]), (5, asked), (5, asked[::-1]), (6, asked)):
        of.send([*before, user("else")], **GREEDY)
        texts.append(of.send(asked, seed=seed, **drawn).text)
    assert texts[0] == texts[1] == texts[2] != texts[3]
