"""A prepared prompt costs what its plan says, and answers as the plain model does, tier by tier."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tokenizers import normalizers

from kamera import ChunkStore, ReusePolicy
from kamera.engines.hf import HfEngine
from kamera.errors import EmptyChunk, ProcessorRequired
from kamera.reuse import Media, Prompt
from tests.content import templates
from tests.reuse.rig import FULL, HEAD, error, family, parts, plain, prompt, reuser, words
from tests.sessions.rig import speaking

FAMILIES = ("qwen2_5_vl", "deepseek_v3", "llama_mqa")
EXACT = ReusePolicy.exact()


def tiers(found) -> list[str]:
    return [a.tier for a in found.admissions]


def answered(plan):
    """The run plan, after the check that it cost what it said."""
    done = plan.run()
    said = (plan.cost.forwards, plan.cost.tokens)
    assert (done.report.forwards, done.report.tokens_recomputed) == said
    return done, done.window.next_token_logits(done.question)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_exact_tier_equals_the_uncached_model(name):
    backbone, draw = family(name), random.Random(0)
    one = reuser(backbone, policy=EXACT)
    *pool, question = parts()
    kept = 0
    for _ in range(8):
        asked = prompt(*draw.sample(pool, draw.randint(1, 4)), question)
        plan = one.prepare(asked)
        done, logits = answered(plan)
        assert {a.tier for a in done.admissions} <= {"exact", "none"}
        assert error(logits, plain(backbone, asked)) < 1e-4
        kept += sum(a.tier == "exact" for a in done.admissions)
    assert kept >= 3


@pytest.mark.parametrize("name", FAMILIES)
def test_a_moved_prompt_takes_patches_from_the_store(name):
    backbone, store = family(name), ChunkStore.open("memory://")
    a, b, c, _, question = parts()
    answered(reuser(backbone, store).prepare(prompt(a, b, c, question)))
    asked = prompt(a, b, c, words(9, 7))
    done, logits = answered(reuser(backbone, store).prepare(asked))  # no window is held here
    assert tiers(done) == ["exact", "patched", "patched"]
    assert done.report.forwards == 0
    assert error(logits, plain(backbone, asked)) < 1e-4
    assert [s.guarantee for s in done.window.slots] == ["exact", "patched", "patched"]


def test_the_longest_prefix_of_earlier_prompts_is_kept():
    backbone = family("llama_mqa")
    one = reuser(backbone)
    a, b, c, d, question = parts()
    for spans in ((a, b), (a, b, c), (a, c)):
        answered(one.prepare(prompt(*spans, question)))
    plan = one.prepare(prompt(a, b, c, d, question))
    assert plan.prefix == sum(map(len, (HEAD, a, b, c)))
    assert tiers(plan) == ["exact", "exact", "exact", "none"]
    assert plan.cost.tokens == 2 * len(d)  # in context, and behind the sink alone for the store


@pytest.mark.few(3)
@pytest.mark.parametrize("change", ["negated", "renamed", "dropped", "swapped"])
def test_a_changed_left_context_is_never_exact_or_patched(change):
    backbone = family("llama_mqa")
    one = reuser(backbone)
    a, b, c, _, question = parts()
    answered(one.prepare(prompt(a, b, c, question)))
    altered = a.clone()
    altered[-1] = 3 if change == "negated" else int(a[-1]) ^ 1
    left = {"negated": [altered, b], "renamed": [altered, b], "dropped": [b], "swapped": [b, a]}[change]
    asked = prompt(*left, c, question)
    plan = one.prepare(asked)
    assert plan.admissions[-1].tier == "none"
    assert plan.admissions[-1].reason == "stored, but not for this left context"
    _, logits = answered(plan)
    assert error(logits, plain(backbone, asked)) < 1e-4


def test_bad_prompts_are_refused_by_name():
    one = reuser(family("llama_mqa"))
    with pytest.raises(EmptyChunk, match="no tokens"):
        one.prepare(torch.empty(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="vocabulary"):
        one.prepare(torch.tensor([5, 6, 7, 8, 9, 100_000, 9, 9]))
    with pytest.raises(ValueError, match="0 to 4294967295"):
        one.prepare(torch.tensor([5, -6]))
    with pytest.raises(ValueError, match="no pixels"):
        one.prepare(Prompt.of([1, 2, 3, 4], media=[Media(1, 3, "digest")]))
    with pytest.raises(ProcessorRequired, match="chat template"):
        one.prepare([{"role": "user", "content": "hello"}])
    with pytest.raises(ValueError, match="sink=0"):
        reuser(family("llama_mqa"), sink=0)


def test_a_store_of_another_model_or_tenant_is_a_miss():
    store = ChunkStore.open("memory://")
    asked = prompt(*parts())
    answered(reuser(family("llama_mqa"), store).prepare(asked))
    other = reuser(family("qwen2_5_vl"), store).prepare(asked)
    assert {a.reason for a in other.admissions} == {"no copy is stored"}
    foreign = ChunkStore.open("memory://", tenant="b")
    assert tiers(reuser(family("llama_mqa"), foreign, FULL).prepare(asked)) == ["none"] * 4


def test_a_damaged_store_is_a_miss_and_says_so(tmp_path):
    backbone, asked = family("llama_mqa"), prompt(*parts())
    with ChunkStore.open(tmp_path / "store") as store:
        answered(reuser(backbone, store).prepare(asked))
    for path in (p for p in (tmp_path / "store").rglob("*") if p.is_file() and "objects" in p.parts):
        held = bytearray(path.read_bytes())
        held[-9] ^= 1  # a byte of the last tensor
        path.write_bytes(held)
    with ChunkStore.open(tmp_path / "store") as store:
        done = reuser(backbone, store).prepare(asked).run()
        logits = done.window.next_token_logits(done.question)
    assert error(logits, plain(backbone, asked)) < 1e-4
    assert set(tiers(done)[1:]) == {"none"}
    assert any("refused" in note for note in done.report.notes)


def test_a_tokenizer_that_changed_is_a_miss():
    store, asked = ChunkStore.open("memory://"), [{"role": "user", "content": "Hello You Hello"}]
    before = speaking("headers")
    answered(reuser(before, store).prepare(asked))
    assert {a.tier for a in reuser(before, store).prepare(asked).admissions} <= {"exact", "patched"}
    changed = templates.speaker("headers")
    changed.backend_tokenizer.normalizer = normalizers.Lowercase()
    after = HfEngine(before.model, changed)
    plan = reuser(after, store).prepare(asked)
    assert {a.reason for a in plan.admissions} == {"no copy is stored"}


@pytest.mark.parametrize("minimum", ["patched", "orbit", "near", "blind"])
def test_what_is_stored_for_another_left_context_is_served_only_where_a_policy_says_so(minimum):
    backbone, store = family("llama_mqa"), ChunkStore.open("memory://")
    a, b, c, d, question = parts()
    reuser(backbone, store).prepare(prompt(a, b, c, question)).run()
    asked = prompt(d, b, c, question)
    done = reuser(backbone, store, replace(FULL, minimum=minimum, max_divergence=1.0)).prepare(asked).run()
    if minimum in ("near", "blind"):
        assert tiers(done)[-2:] == ["near", "near"] == [slot.guarantee for slot in done.window.slots][-2:]
        assert "another left context" in done.admissions[-1].reason
        return
    assert [x.tier for x in done.admissions] == ["none"] * 3
    assert "stored, but not for this left context" in done.admissions[1].reason
    assert {slot.guarantee for slot in done.window.slots} == {"exact"}
    assert error(done.window.next_token_logits(done.question), plain(backbone, asked)) < 1e-4
