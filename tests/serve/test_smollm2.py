"""A server of a language model with real weights, asked by OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest

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
from tests.serve.rig import Served, serving

pytestmark = needs_smollm2

GREEDY: dict[str, Any] = {"model": "smollm2", "max_tokens": 16, "temperature": 0}


@pytest.fixture(scope="module")
def served():
    with serving(smollm2().engine, names=("smollm2",)) as found:
        yield found


def test_a_chat_is_answered_sensibly_and_runs_what_is_new(served: Served):
    client, history = served.openai(), [*CHAT, ASK_CAT]
    answer = client.chat.completions.create(messages=history, logprobs=True, **GREEDY)
    assert answer.choices[0].message.content == MINKA and answer.choices[0].finish_reason == "stop"
    likeliest = float(plain_of_chat(history).log_softmax(-1).max())
    assert answer.choices[0].logprobs.content[0].logprob == pytest.approx(likeliest, abs=1e-3)
    history += [said("assistant", MINKA), ASK_CODE]
    told = client.chat.completions.create(messages=history, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == CODE_SAID
    again = client.chat.completions.create(messages=history, **GREEDY)
    assert again.choices[0].message.content == CODE_SAID
    assert again.usage.prompt_tokens_details.cached_tokens > 0.9 * again.usage.prompt_tokens


@pytest.mark.slow
def test_what_a_client_drops_or_a_directive_removes_is_gone_over_http(served: Served):
    client = served.openai()
    first = client.chat.completions.create(messages=[*CHAT, ASK_CODE], **GREEDY)
    assert first.choices[0].message.content == CODE_SAID
    without = [*CHAT[:3], ASK_CODE]
    plain = float(plain_of_chat(without).log_softmax(-1).max())
    gone = {"directives": [{"start": 3, "end": 5}]}
    for messages, kamera in ((without, {}), ([*CHAT, ASK_CODE], gone)):
        answer = client.chat.completions.create(
            messages=messages, logprobs=True, extra_body={"kamera": kamera}, **GREEDY
        )
        assert "4711" not in answer.choices[0].message.content
        assert answer.choices[0].logprobs.content[0].logprob == pytest.approx(plain, abs=1e-3)
        assert answer.model_extra["kamera"]["guarantee"] == "exact"
