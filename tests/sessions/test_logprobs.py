"""Logprobs of an answer are those of the model, step by step; an answer that wants none is the same."""

from __future__ import annotations

import pytest
import torch

from tests.content.templates import TALK
from tests.sessions.rig import seeing, session, speaking

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


def test_the_first_is_of_the_sessions_own_logits_behind_a_picture():
    from tests.content.templates import screens

    chat = session(seeing())
    truth = chat.next_token_logits(screens(2)).log_softmax(-1)
    (one,) = chat.send(screens(2), max_new_tokens=1, do_sample=False, logprobs=0).logprobs
    assert one.likeliest == () and one.token_id == int(truth.argmax())
    assert one.logprob == pytest.approx(float(truth.max()), abs=1e-4)


def test_an_answer_is_the_same_with_logprobs_and_has_none_unasked():
    chat = session(speaking("headers"))
    plain, noted = (chat.fork().send(TALK, seed=5, logprobs=n, **OPTIONS) for n in (None, 2))
    assert plain.token_ids == noted.token_ids and plain.logprobs is None and len(noted.logprobs) == 5


def test_a_plain_models_answer_has_them_too():
    chat = session(speaking("headers"), uncached=True, max_tokens=8)  # no window holds it
    turn = chat.send(TALK[:1], do_sample=False, logprobs=1, **OPTIONS)
    assert turn.report.uncached and [one.likeliest[0][0] for one in turn.logprobs] == list(turn.token_ids)


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
