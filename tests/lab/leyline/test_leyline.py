"""The single prompt's references disagree by construction, and arms are judged against both."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from kamera import testbed
from kamera.engines.hf import HfEngine
from lab.leyline import single as single_module
from lab.leyline.judged import Judge
from lab.leyline.prompts import HELD_OUT, STUBS, Desk, conversation, items, span_of, stub_text
from lab.leyline.single import ARMS, single


def test_every_question_s_answer_changes_with_the_frame_that_leaves():
    world, index = testbed.World(HELD_OUT), {}
    for number in range(40):
        for layout in ("LLI", "LPLI", "LLLI"):
            episode = world.episode(number, layout=layout)
            index[episode.frames] = episode
    for item in islice(items("gqa-unled", 0, 5), 4):
        episode = index[item.frames]
        rest = [i for i in range(len(item.frames)) if i != item.gone]
        asked = {q.text: q for q in episode.questions}
        for text in item.questions:
            assert episode.answer(asked[text], rest) not in (None, asked[text].answer)


@pytest.mark.parametrize("kind", STUBS)
def test_padding_and_noise_are_as_long_as_the_span(kind):
    desk = Desk(HfEngine(*testbed.load()))
    frames = testbed.World(1).episode(0, layout="LLI").frames
    rendered = desk.conversations.render(conversation(frames))
    start, stop = span_of(rendered, 1)
    assert [s.kind for s in rendered.segments[start:stop]] == ["image", "text"]
    tokens = sum(s.num_tokens for s in rendered.segments[start:stop])
    text = stub_text(kind, tokens, desk.conversations.tokenize, 3)
    size = len(desk.conversations.tokenize(text)) if text else 0
    if kind in ("pad", "scrambled"):
        assert tokens <= size <= tokens + 3
    else:
        assert size < tokens


def test_an_arm_is_judged_where_the_references_disagree():
    full, new = torch.eye(4)[1] * 9, torch.eye(4)[2] * 9
    judge = Judge()
    for said, before, after in ((full, full, new), (new, full, new), (torch.eye(4)[3], full, new)):
        judge.see(said, before, after)
    judge.see(full, full, full)
    summary = judge.summary()
    assert (summary["n"], summary["references disagree"]) == (4, 3)
    shares = [summary[f"of these, as {who}"] for who in ("full", "re-prefill", "neither")]
    assert shares == [pytest.approx(1 / 3, abs=1e-4)] * 3
    assert Judge.joined([judge, judge]).summary()["n"] == 8


@pytest.mark.slow
def test_amortize_follows_the_full_context_and_repair_re_prefill(monkeypatch):
    monkeypatch.setattr(single_module, "PER_EDIT", 2)
    found = single(HfEngine(*testbed.load()), "gqa", 1, 0, before=False)
    shares = {arm: found["arms"][arm] for arm in ARMS}
    assert shares["amortize"]["of these, as full"] == 1.0
    assert all(shares[arm]["of these, as re-prefill"] == 1.0 for arm in ARMS[1:])
    assert found["cost of an edit"]["repair, stored"]["forwards"] == 1.0
    assert all(cost["vision encodes"] == 0 for arm, cost in found["cost of an edit"].items() if arm in ARMS)
