"""Prompts of real processors: what Kamera runs is what transformers makes of the whole history."""

from __future__ import annotations

import pytest

from kamera import ChatSession, ChunkStore, ReusePolicy
from tests.models import families
from tests.models.families import picture, plain_logits, said, whole_prompt


@pytest.mark.parametrize("family", families.families())
def test_a_picture_between_words_runs_as_the_whole_prompt(family):
    if family == "ernie":
        pytest.xfail("types of tokens are guessed, not the processor's")
    engine = families.engine(family)
    messages = [said("user", "look: ", picture(), " what?")]
    inputs = whole_prompt(engine.processor, messages)
    session = ChatSession(engine, ChunkStore.open("memory://"), policy=ReusePolicy.exact())
    logits, expected = session.next_token_logits(messages), plain_logits(engine.model, inputs)
    assert session.prompt_ids.tolist() == inputs["input_ids"][0].tolist()
    assert (logits - expected).norm() / expected.norm() < 1e-4
