"""Prompts made of heads and tails of segments seen before: what is exact equals an uncached run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera import ChunkStore, ReusePolicy
from tests.reuse.rig import FULL, error, family, parts, plain, prompt, reuser, words

EXACT = ReusePolicy.exact()
POOL = [words(seed, 30) for seed in (1, 2, 3)]


def check(plan, backbone, asked):
    """The run plan, after the check of its cost and its answer."""
    done = plan.run()
    assert (done.report.forwards, done.report.tokens_recomputed) == (plan.cost.forwards, plan.cost.tokens)
    assert error(done.window.next_token_logits(done.question), plain(backbone, asked)) < 1e-4
    return done


@pytest.mark.parametrize("name", ["qwen2_5_vl", "deepseek_v3", "llama_mqa"])
def test_the_unchanged_head_of_an_edited_segment_is_kept(name):
    backbone, one = family(name), reuser(family(name), policy=EXACT)
    a, b, c, _, question = parts()
    check(one.prepare(prompt(a, b, c, question)), backbone, prompt(a, b, c, question))
    edited = torch.cat([b[:11], words(70, 5)])
    plan = one.prepare(prompt(a, edited, c, question))
    assert [(x.tier, x.head) for x in plan.admissions] == [("exact", 0), ("none", 11), ("none", 0)]
    assert "the window holds its first 11 tokens" in plan.admissions[1].reason
    assert plan.cost.tokens == 5 + len(c)
    done = check(plan, backbone, prompt(a, edited, c, question))
    assert [x.head for x in done.admissions] == [0, 11, 0]


def test_a_tail_piece_is_never_exact():
    backbone, one = family("llama_mqa"), reuser(family("llama_mqa"), policy=EXACT)
    a, b, _, _, question = parts()
    check(one.prepare(prompt(a, b, question)), backbone, prompt(a, b, question))
    for spans in ((a, b[9:]), (b[:9], b[9:])):
        plan = one.prepare(prompt(*spans, question))
        assert (plan.admissions[-1].tier, plan.admissions[-1].head) == ("none", 0)
        check(plan, backbone, prompt(*spans, question))


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_random_prompts_of_pieces_equal_an_uncached_run(data):
    backbone = family("llama_mqa")
    policy = data.draw(st.sampled_from([EXACT, FULL]))
    one = reuser(backbone, ChunkStore.open("memory://"), policy)

    def piece() -> torch.Tensor:
        whole = POOL[data.draw(st.integers(0, 2))]
        cut = data.draw(st.integers(1, 29))
        kind = data.draw(st.sampled_from(["whole", "head", "tail", "edited"]))
        if kind == "edited":
            return torch.cat([whole[:cut], words(data.draw(st.integers(20, 22)), 4)])
        return {"whole": whole, "head": whole[:cut], "tail": whole[cut:]}[kind]

    spans: list[torch.Tensor] = []
    for _ in range(3):
        at = data.draw(st.integers(0, len(spans)))
        spans = [*spans[:at], piece(), *spans[at + data.draw(st.integers(0, 1)) :]]
        asked = prompt(*spans, words(5, 6))
        done = check(one.prepare(asked), backbone, asked)
        assert {x.tier for x in done.admissions} <= {"exact", "patched", "none"}


def test_a_damaged_canonical_gives_no_head(tmp_path):
    backbone = family("llama_mqa")
    a, _, c, d, question = parts()
    whole = words(90, 30)
    edited = torch.cat([whole[:20], words(70, 5)])
    with ChunkStore.open(tmp_path / "store", memory_limit=0) as store:
        one = reuser(backbone, store)
        for spans in ((a, whole), (c,)):
            one.prepare(prompt(*spans, question)).run()
        plan = one.prepare(prompt(d, edited, question))
        (key,) = [info.key for info in store.ls("canonical") if info.tokens == len(whole)]
        (file,) = [path for path in (tmp_path / "store").rglob("*") if key in path.name]
        held = bytearray(file.read_bytes())
        held[-9] ^= 1
        file.write_bytes(held)
        done = plan.run()
        assert done.report.tokens_recomputed == len(d) + 2 * len(edited)
        logits = done.window.next_token_logits(done.question)
        assert error(logits, plain(backbone, prompt(d, edited, question))) < 1e-4
