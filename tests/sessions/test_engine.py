"""Sessions, pools and reuse know an engine by its contract: here one that is no transformers model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kamera import ChatSession, ChunkStore, ReusePolicy, SessionPool
from kamera.content import Conversations
from kamera.edits import policies
from tests.content import templates
from tests.engines.compare import relative
from tests.patches.engine import SmallEngine

ANSWER = {"max_new_tokens": 3}
WORDS = ("red", "green", "blue", "seven", "nine", "house")


class Speaker(SmallEngine):
    """The small engine with a real tokenizer and its chat template."""

    def check_sampling(self, sampling: dict[str, Any]) -> None:
        assert set(sampling) <= {"max_new_tokens", "logits_processor", "stopping_criteria"}

    def question_ids(self, question: torch.Tensor, tail: str) -> torch.Tensor:
        return question

    def detokenize(self, ids: torch.Tensor) -> str:
        return self.processor.decode(ids, skip_special_tokens=True)


@pytest.fixture
def engine() -> Speaker:
    tokenizer = templates.speaker("headers")
    return Speaker(processor=tokenizer, token_count=len(tokenizer))


def said(word: str) -> dict[str, str]:
    return {"role": "user", "content": f"the word is {word}"}


def whole(engine: Speaker, messages: Any) -> dict[str, torch.Tensor]:
    return Conversations(engine.processor).whole(messages)


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("policy", [ReusePolicy.exact(), ReusePolicy()])
def test_a_session_answers_as_the_plain_engine_does(engine, policy, reuse):
    session = ChatSession(engine, ChunkStore.open("memory://"), policy=policy, reuse=reuse)
    for word in WORDS[:4]:
        asked = [*session.messages, said(word)]
        wanted = engine.plain.generate(whole(engine, asked), **ANSWER)[0]
        assert session.send(asked, **ANSWER).text == engine.builder.detokenize(wanted)
    edited = [*session.messages[2:], said(WORDS[4])]
    assert relative(session.next_token_logits(edited), engine.plain.logits(whole(engine, edited))) < 1e-4
    session.flush()


def test_a_pool_and_an_edit_policy_run_on_it(engine):
    store = ChunkStore.open("memory://")
    pool = SessionPool(engine, store, policy=ReusePolicy.exact(), min_tokens=8)
    first = pool.send([said("red")], **ANSWER)
    again = pool.send([said("red"), {"role": "assistant", "content": first.text}, said("blue")], **ANSWER)
    assert again.session_id == first.session_id
    shorter = ChatSession(engine, store, policy=ReusePolicy.exact(), edit_policy=policies.keep_ends(0, 1))
    for word in WORDS[:3]:
        turn = shorter.send([*shorter.messages, said(word)], **ANSWER)
    wanted = engine.plain.generate(whole(engine, [said(WORDS[2])]), **ANSWER)[0]
    assert turn.text == engine.builder.detokenize(wanted)
