"""Scratch: messages that one answer alone sees."""

from __future__ import annotations

import pytest
import torch

from kamera.window import shown_spans
from tests.content.templates import screens
from tests.engines.compare import relative
from tests.sessions.rig import EXACT, FULL, seeing, session

GREEDY = {"max_new_tokens": 2, "do_sample": False}
NOTE = [{"role": "assistant", "content": "thinking of many things"}, {"role": "user", "content": "go on"}]


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["amortize", "forget"])
def test_scratch_is_attended_and_leaves_no_trace(mode):
    policy = EXACT if mode == "forget" else FULL
    with_it, without, other, fourth = (session(seeing(), policy, mode=mode) for _ in range(4))
    assert with_it.send(screens(2), **GREEDY).text == without.send(screens(2), **GREEDY).text
    whole = [*with_it.messages, {"role": "user", "content": "what now?"}]
    seen = other.next_token_logits([*whole, *NOTE])
    longer = {"max_new_tokens": 8, "do_sample": False}
    turn = with_it.send(whole, scratch=NOTE, **longer)
    said = [chat.send(m, **longer).text for chat, m in ((other, [*whole, *NOTE]), (fourth, whole))]
    assert said[0] == turn.text != said[1]
    unseen = without.next_token_logits(whole)
    assert relative(seen, unseen) > 1e-3  # it was attended
    assert [s.chunk_id for s in with_it.window.slots] == [s.chunk_id for s in without.window.slots]
    said = [*whole, {"role": "assistant", "content": turn.text}]
    assert with_it.messages == said
    after = [*said, {"role": "user", "content": "and then?"}]
    assert torch.equal(with_it.next_token_logits(after), without.next_token_logits(after))
    one, two = with_it.window, without.window
    assert [s.chunk_id for s in one.slots] == [s.chunk_id for s in two.slots]
    for mine, theirs in zip(shown_spans(one)[1:], shown_spans(two)[1:], strict=True):
        for a, b in zip(mine.kv, theirs.kv, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)
