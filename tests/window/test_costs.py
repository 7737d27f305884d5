"""What operations cost, counted by the test's own hooks on the model (promise 3)."""

from __future__ import annotations

import pytest

from kamera import ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.window import former_of
from tests.models import tiny
from tests.window.rig import QUESTION, guarantees, live, make, rig, same_bits, watching

FAMILIES = ("qwen2_5_vl", "gemma3", "kimi_k25")


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_moves_within_reach_of_stored_patches_run_nothing(family):
    backbone, chunks = rig(family)
    window = make(backbone, None, *chunks[:3])
    window.reorder([2, 0, 1])  # forms what the next reorder finds
    window.reorder([0, 1, 2])
    a, b, c = (s.chunk_id for s in window.slots)
    moves = [
        ("reorder", lambda: window.reorder([1, 2, 0])),
        ("condition off", lambda: window.condition(1, False)),
        ("condition on", lambda: window.condition(1, True)),
        ("slide", lambda: window.slide()),
        ("evict", lambda: window.evict(1)),
        ("evict", lambda: window.evict(0)),
        ("recall into front", lambda: window.recall(a)),
        ("recall", lambda: window.recall(b)),
        ("append of a stored chunk", lambda: window.append(next(x for x in chunks if x.id == c))),
        ("condition unchanged", lambda: window.condition(0, True)),
    ]
    order = {s: i for i, s in enumerate((a, b, c))}
    for name, move in moves:
        with watching(backbone) as seen:
            report = move()
        assert (seen.forwards, seen.encodes) == (0, 0), name
        assert (report.forwards, report.tokens_recomputed, report.vision_encodes) == (0, 0, 0), name
    assert [order[s.chunk_id] for s in window.slots] == [0, 1, 2]
    assert guarantees(window) == ["exact", "patched", "patched"]


@pytest.mark.few(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policy",
    [
        ReusePolicy(forms="always"),
        ReusePolicy(minimum="exact"),
        ReusePolicy(on_miss="prefill", forms="always"),
    ],
)
def test_a_recall_that_misses_is_one_forward_and_no_encode(family, policy):
    backbone, chunks = rig(family)
    store = former_of(make(backbone, None, chunks[1])).store
    window = make(backbone, store, chunks[0], policy=policy)
    with watching(backbone) as seen:
        report = window.recall(chunks[1].id)
    assert (seen.forwards, seen.tokens, seen.encodes) == (1, chunks[1].num_tokens, 0)
    assert (report.forwards, report.tokens_recomputed, report.vision_encodes) == (1, chunks[1].num_tokens, 0)
    assert guarantees(window) == ["exact", "exact"]


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_chunk_costs_one_encode_and_two_forwards(family):
    backbone, chunks = rig(family)
    window = make(backbone)
    costs = []
    for chunk in chunks[:2]:
        with watching(backbone) as seen:
            window.append(chunk)
        costs.append((seen.forwards, seen.encodes))
    # a leading chunk's canonical is its prefill
    assert costs == [(1, 1), (2, 1)]


def test_an_exact_slide_runs_one_forward_for_all_survivors():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks, policy=ReusePolicy(minimum="exact"))
    with watching(backbone) as seen:
        report = window.slide()
    assert seen.spans == [sum(slot.length for slot in window.slots)] and seen.encodes == 0
    assert (report.forwards, report.tokens_recomputed, report.vision_encodes) == (1, seen.tokens, 0)


def test_a_window_built_again_from_its_store_runs_nothing(tmp_path):
    """Patches were harvested from the prefills in context; the store may be opened by another process."""
    backbone, chunks = rig("qwen3_vl")
    with ChunkStore.open(tmp_path / "store") as store:
        first = make(backbone, store, *chunks)
        with watching(backbone) as seen:
            again = make(backbone, store)
            anchor = seen.forwards
            for chunk in chunks:
                again.append(chunk)
        assert (seen.forwards - anchor, seen.encodes) == (0, 0)
        assert guarantees(again) == ["exact", "patched", "patched", "patched"]
    equal = HfEngine(tiny.build("qwen3_vl"))
    assert equal.fingerprint == backbone.fingerprint
    with ChunkStore.open(tmp_path / "store") as store:
        other = make(equal, store)
        with watching(equal) as seen:
            for slot in first.slots:
                other.recall(slot.chunk_id)
        assert (seen.forwards, seen.encodes) == (0, 0)
        for i in range(len(chunks)):
            assert same_bits(live(again, i), live(other, i))
        assert (other.next_token_logits(QUESTION) == again.next_token_logits(QUESTION)).all()


def test_questions_run_one_forward_over_the_question_alone():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks)
    with watching(backbone) as seen:
        window.next_token_logits(QUESTION)
    assert (seen.forwards, seen.tokens, seen.encodes) == (1, len(QUESTION), 0)
    with watching(backbone) as seen:
        window.generate(QUESTION, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    assert (seen.tokens, seen.encodes) == (len(QUESTION) + 2, 0)


# -- archive="later" -------------------------------------------------------------------------------
