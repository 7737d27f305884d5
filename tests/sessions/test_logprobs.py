"""Logprobs of an answer are those of the model, step by step; an answer that wants none is the same."""

from __future__ import annotations

import pytest
import torch

from tests.content.templates import TALK
from tests.sessions.rig import session, speaking

OPTIONS = {"max_new_tokens": 5}


@pytest.mark.parametrize("drawn", [{"do_sample": False}, {"seed": 4, "temperature": 1.7, "top_k": 9}])
def test_logprobs_are_those_of_the_models_logits_step_by_step(drawn):
    chat = session(speaking("headers"))
    turn = chat.send(TALK[:1], logprobs=3, **drawn, **OPTIONS)
    assert [one.token_id for one in turn.logprobs] == list(turn.token_ids)
    ids = chat.prompt_ids
    for place, one in enumerate(turn.logprobs):
        whole = torch.cat([ids, torch.tensor(turn.token_ids[:place], dtype=torch.int64)])
        with torch.no_grad():
            truth = chat.backbone.model(input_ids=whole[None]).logits[0, -1].log_softmax(-1)
        assert one.logprob == pytest.approx(float(truth[one.token_id]), abs=1e-4)
        best = truth.topk(3)
        assert [token for token, _ in one.likeliest] == best.indices.tolist()
        assert [value for _, value in one.likeliest] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"logprobs": 21}, "0 to 20"),
        ({"logprobs": True}, "0 to 20"),
        ({"logprobs": 1, "num_beams": 2}, "beams"),
    ],
)
def test_what_cannot_be_noted_is_refused_before_anything_runs(options, says):
    chat = session(speaking("headers"))
    with pytest.raises(ValueError, match=says):
        chat.send(TALK, **options, **OPTIONS)
    assert chat.messages == []
