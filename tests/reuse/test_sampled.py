"""Passages that come again in another order are served by a few of their tokens."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from kamera import ChunkStore, ReusePolicy
from kamera.reuse import Prompt, Reuser
from kamera.window import SHORTEST_KEPT
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


@pytest.mark.parametrize("seed", [0, 1, 3])
@pytest.mark.parametrize("waits", [True, False])
def test_a_plan_says_what_later_work_runs(seed, waits):
    """Texts begin as others that are stored, and come again before their canonicals are."""
    backbone, rng = tiny.backbone("llama_mqa"), random.Random(seed)
    reuser = Reuser(backbone, ChunkStore.open("memory://"), replace(POLICY, audit=0.0))
    head, *passages = [samples.text_ids(n, 50 * seed + n) for n in (20, 80, 60, 90, 81, 40, 50)]
    reuser.prepare(torch.cat([head, *passages[:2]])).run().window.flush()
    before, told = reuser.usage().later, Counter()
    for i in range(8):
        order = rng.sample(passages, rng.randint(2, 6))
        for j in rng.sample(range(len(order)), len(order) // 3):
            order[j] = torch.cat([order[j][: rng.randint(10, 40)], samples.text_ids(12, rng.randrange(9999))])
        plan = reuser.prepare(torch.cat([head, *order, samples.text_ids(9, 100 + i)]))
        told.update(forwards=plan.later.forwards, tokens=plan.later.tokens)
        window = plan.run().window
        if waits:
            window.flush()
    window.flush()
    ran = reuser.usage().later
    assert told == {"forwards": ran.forwards - before.forwards, "tokens": ran.tokens - before.tokens}
    assert told["forwards"] >= 5


def test_short_texts_that_come_again_run_half_of_their_tokens():
    """Parts of 40 tokens between new words: too short to be kept of themselves, kept since they recur."""
    backbone = tiny.backbone("llama_mqa")
    reuser = Reuser(backbone, ChunkStore.open("memory://"), POLICY)
    head, *parts = [samples.text_ids(n, seed) for seed, n in enumerate((20, 40, 40, 40, 40))]
    rng = random.Random(1)
    with watching(backbone, later=True) as seen:
        for i in range(5):
            pieces = [head]
            for part in rng.sample(parts, 4):
                pieces += [samples.text_ids(10, rng.randrange(10**6)), part]
            starts = itertools.accumulate(len(piece) for piece in pieces)
            ids = torch.cat([*pieces, samples.text_ids(9, 100 + i)])
            done = reuser.prepare(Prompt.of(ids.numpy(), anchors=[*starts])).run()
            done.window.flush()
    assert borne(seen, reuser.usage())
    slots = [slot for slot in done.window.slots if slot.guarantee == "sampled"]
    assert sum(slot.length for slot in slots) >= 100
    assert all(slot.share == round(0.5 * slot.length) / slot.length for slot in slots)
    assert all(slot.length >= SHORTEST_KEPT for slot in slots)


def test_under_exact_the_same_prompts_answer_as_the_model():
    backbone = tiny.backbone("llama_mqa")
    reuser = Reuser(backbone, ChunkStore.open("memory://"), ReusePolicy.exact())
    for ids in prompts(4):
        done = reuser.prepare(ids).run()
        with torch.no_grad():
            true = backbone.model(input_ids=ids[None]).logits[0, -1]
        assert relative(done.window.next_token_logits(done.question), true) <= 1e-4
