"""Passages that come again in another order are served by a few of their tokens."""

from __future__ import annotations

import random

import torch

from kamera import ChunkStore, ReusePolicy
from kamera.reuse import Reuser
from tests.engines.compare import relative
from tests.models import samples, tiny
from tests.window.rig import borne, watching

POLICY = ReusePolicy(minimum="sampled", share=0.3, max_error=1.0, certified=False)


def prompts(count: int) -> list[torch.Tensor]:
    """A header, then four passages of 80 tokens in an order of their own, and a question."""
    head, *passages = [samples.text_ids(n, seed) for seed, n in enumerate((20, 80, 80, 80, 80))]
    rng, out = random.Random(0), []
    for i in range(count):
        order = rng.sample(passages, 4)
        out.append(torch.cat([head, *order, samples.text_ids(9, 100 + i)]))
    return out


def test_shuffled_passages_are_sampled_and_counted_as_hooks_count():
    backbone = tiny.backbone("llama_mqa")
    reuser = Reuser(backbone, ChunkStore.open("memory://"), POLICY)
    with watching(backbone, later=True) as seen:
        for ids in prompts(12):
            plan = reuser.prepare(ids)
            admissions, cost = plan.admissions, plan.cost
            done = plan.run()
            assert done.report.tokens_recomputed == cost.tokens
            done.window.flush()
    assert borne(seen, reuser.usage())
    sampled = [a for a in admissions if a.tier == "sampled"]
    assert any("tokens run for this left context" in a.reason for a in sampled)
    assert sum(a.tokens for a in admissions if a.tier != "none") >= 160
    assert cost.tokens < 0.6 * sum(a.tokens for a in admissions)


def test_under_exact_the_same_prompts_answer_as_the_model():
    backbone = tiny.backbone("llama_mqa")
    reuser = Reuser(backbone, ChunkStore.open("memory://"), ReusePolicy.exact())
    for ids in prompts(4):
        done = reuser.prepare(ids).run()
        with torch.no_grad():
            true = backbone.model(input_ids=ids[None]).logits[0, -1]
        assert relative(done.window.next_token_logits(done.question), true) <= 1e-4
