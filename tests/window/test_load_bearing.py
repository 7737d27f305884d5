"""Would the answer change without this chunk? Held against two explicit windows."""

from __future__ import annotations

import pytest
import torch

from kamera import ReusePolicy
from kamera.window import former_of
from tests.models import samples, tiny
from tests.window.rig import FULL_RANK, GREEDY, QUESTION, Snapshot, inventory, make, rig, watching


def explicit(backbone, chunks, index, question, new: int) -> bool:
    """Whether the greedy answers of two freshly prefilled windows differ."""
    answers = []
    for held in (chunks, [c for i, c in enumerate(chunks) if i != index]):
        window = make(backbone, None, *held, policy=ReusePolicy(minimum="exact"))
        answers.append(window.generate(question, max_new_tokens=new, **GREEDY))
    return not torch.equal(*answers)


def sliding():
    """Three layers that see 8 tokens back: what is more than 21 tokens behind cannot bear anything."""
    backbone = tiny.backbone("mistral_sliding")
    return backbone, [backbone.chunk_from_tensors(samples.text_ids(12, seed)) for seed in range(4)]


@pytest.mark.parametrize("minimum", ["exact", "patched"])
def test_only_chunks_within_the_models_reach_bear_load(minimum):
    backbone, chunks = sliding()
    window = make(
        backbone, None, *chunks, policy=ReusePolicy(minimum=minimum, rank=FULL_RANK, forms="always")
    )
    got = [window.is_load_bearing(i, QUESTION, max_new_tokens=4) for i in (0, 3)]
    assert got == [explicit(backbone, chunks, i, QUESTION, 4) for i in (0, 3)] == [False, True]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25"])
def test_pictures_bear_load_when_the_answer_without_them_differs(family):
    backbone, chunks = rig(family, count=3)
    window = make(backbone, None, *chunks)
    before = Snapshot.of(window)
    for index in range(len(chunks)):
        with watching(backbone) as seen:
            got = window.is_load_bearing(index, QUESTION, max_new_tokens=4)
        assert seen.encodes == 0
        assert got == explicit(backbone, chunks, index, QUESTION, 4)
    assert before.matches(window)


def test_an_unchanged_answer_costs_two_decodes():
    backbone, chunks = sliding()
    window = make(backbone, None, *chunks)
    held = inventory(former_of(window).store)
    question = samples.text_ids(30, 9)  # long enough that no chunk is in reach of its end
    with watching(backbone) as seen:
        assert not window.is_load_bearing(1, question, max_new_tokens=1)
    assert (seen.forwards, seen.tokens, seen.encodes) == (2, 60, 0)
    assert inventory(former_of(window).store) == held


def test_a_changed_answer_settles_it_when_no_canonical_stood_in():
    backbone, chunks = sliding()
    window = make(backbone, None, *chunks)
    held = inventory(former_of(window).store)
    with watching(backbone) as seen:
        assert window.is_load_bearing(3, QUESTION, max_new_tokens=8)  # nothing stands behind it
    assert seen.tokens <= 2 * (len(QUESTION) + 7)
    assert inventory(former_of(window).store) == held


def test_a_changed_answer_after_a_canonical_is_prefilled():
    backbone, chunks = sliding()
    window = make(backbone, None, *chunks)
    made_sure = 0
    for seed in range(12):
        question = samples.text_ids(4, seed)
        with watching(backbone) as seen:
            assert not window.is_load_bearing(0, question, max_new_tokens=4)
        prefills = [s for s in seen.spans if s not in (1, len(question))]
        if prefills and not made_sure:
            # the new leading chunk has its canonical; the rest were tokens of three answers
            assert prefills == [c.num_tokens for c in chunks[2:]]
            assert seen.spans.count(len(question)) == 3
            made_sure = 1
        else:
            assert not prefills  # settled cheaply, or by the patches of the time before
    assert made_sure


@pytest.mark.parametrize(("minimum", "reach"), [("near", 1.0), ("blind", None)])
def test_a_lax_policy_does_not_make_the_sure_answer_lax(minimum, reach):
    """Neither a patch that holds the very chunk nor a canonical stands in for its absence."""
    backbone, (a, b, c, _) = rig("qwen2_5_vl")
    policy = ReusePolicy(minimum=minimum, max_divergence=reach, rank=FULL_RANK, forms="always")
    questions = [samples.text_ids(3, seed) for seed in range(22, 30)]
    lax = make(backbone, None, a, b, c, policy=policy)
    got = [lax.is_load_bearing(0, q, max_new_tokens=1) for q in questions]
    strict = make(backbone, None, a, b, c)
    assert got == [strict.is_load_bearing(0, q, max_new_tokens=1) for q in questions]
    assert {True, False} == set(got)


def test_a_window_may_be_asked_while_a_view_is_clean():
    backbone, chunks = sliding()
    window = make(backbone, None, *chunks)
    window.condition(2, False)
    before = Snapshot.of(window)
    assert window.is_load_bearing(3, QUESTION, max_new_tokens=8)
    assert before.matches(window)
