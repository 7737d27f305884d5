"""The same windows under other attention code, in half precision, and spread over devices."""

from __future__ import annotations

import pytest
import torch

from kamera import ReusePolicy
from kamera.engines.hf import HfEngine, describe
from kamera.window import former_of, sequence_of
from tests.models import samples, tiny
from tests.window.rig import (
    GREEDY,
    QUESTION,
    Prefilled,
    chunks_of,
    guarantees,
    is_a_reprefill,
    live,
    make,
    watching,
)

FAMILIES = ("qwen2_5_vl", "gemma3", "kimi_k25")


def chunks_for(backbone: HfEngine, family: str):
    return [samples.chunk(backbone, samples.sample(family, seed)) for seed in range(4)]


def script(backbone: HfEngine, family: str, policy: ReusePolicy):
    """A window's day; what it said it was worth after each step, and what that cost."""
    chunks = chunks_for(backbone, family)
    window = make(backbone, None, *chunks, policy=policy)
    said = [guarantees(window)]
    for step in (
        lambda: window.reorder([1, 0, 3, 2]),
        lambda: window.reorder([1, 0, 3, 2]),
        lambda: window.condition(2, False),
        lambda: window.condition(2, True),
        lambda: window.evict(1),
        lambda: window.recall(chunks[1].id),
        lambda: window.slide(2),
        lambda: window.append(chunks[0]),
    ):
        window.flush()  # what is archived later may serve the next step
        report = step()
        said.append((guarantees(window), report.forwards, report.vision_encodes, report.tokens_recomputed))
    return window, said


@pytest.mark.few(1)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_is_a_reprefill_under_either_attention(family, attention):
    model = tiny.build(family)
    model.set_attn_implementation(attention)
    backbone = HfEngine(model)
    assert describe(backbone).attention == attention
    chunks = chunks_for(backbone, family)
    window = make(backbone, None, *chunks)
    window.reorder([3, 1, 0, 2])
    window.reorder([2, 1, 3, 0])
    assert set(guarantees(window)) <= {"exact", "patched"}
    assert is_a_reprefill(window, chunks)
    window = make(backbone, former_of(window).store, *chunks, policy=ReusePolicy(minimum="exact"))
    window.slide(2)
    assert guarantees(window) == ["exact", "exact"]
    assert is_a_reprefill(window, chunks)
    plain = Prefilled(backbone, chunks_of(window, chunks))
    got = window.generate(QUESTION, max_new_tokens=4, **GREEDY)
    assert torch.equal(got, plain.generate(max_new_tokens=4, **GREEDY)[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [ReusePolicy(rank=4, forms="always"), ReusePolicy(minimum="exact")])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_reports_what_single_precision_does(family, policy):
    if policy.minimum == "exact":
        policy = ReusePolicy(minimum="exact", on_miss="prefill")
    halves = tiny.backbone(family, torch.bfloat16)
    window, said = script(halves, family, policy)
    reference, expected = script(tiny.backbone(family), family, policy)
    assert said == expected
    logits = window.next_token_logits(QUESTION)
    assert logits.dtype == torch.bfloat16 and bool(torch.isfinite(logits).all())
    kinds = {t.dtype for i in range(len(window)) for layer in live(window, i) for t in layer.values()}
    assert kinds == {torch.bfloat16}
    assert window.generate(QUESTION, max_new_tokens=3, min_new_tokens=3, **GREEDY).shape == (3,)
    assert torch.equal(sequence_of(window).position_ids, sequence_of(reference).position_ids)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_an_exact_window_in_half_precision_equals_a_reprefill(family):
    """Not to the last bit: a prefill in pieces rounds otherwise than one in a single piece."""
    backbone = tiny.backbone(family, torch.bfloat16)
    chunks = chunks_for(backbone, family)
    window = make(backbone, None, *chunks, policy=ReusePolicy(minimum="exact"))
    window.slide(2)
    assert is_a_reprefill(window, chunks, bound=0.1)


def test_a_model_on_a_device_map_serves_the_same_window():
    accelerate = pytest.importorskip("accelerate")
    plain = tiny.backbone("qwen2_5_vl")
    model = tiny.build("qwen2_5_vl")
    places = {"model.visual": "cpu", "lm_head": "cpu", "model.language_model": "cpu"}
    accelerate.dispatch_model(model, places, main_device="cpu", force_hooks=True)
    spread = HfEngine(model)
    policy = ReusePolicy(rank=8, forms="always")
    window, said = script(spread, "qwen2_5_vl", policy)
    reference, expected = script(plain, "qwen2_5_vl", policy)
    assert said == expected
    assert torch.equal(window.next_token_logits(QUESTION), reference.next_token_logits(QUESTION))
    with watching(spread) as seen:
        window.generate(QUESTION, max_new_tokens=2, **GREEDY)
    assert seen.encodes == 0
