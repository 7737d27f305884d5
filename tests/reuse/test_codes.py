"""Segments out of a store of codes say that they are not exact, and stay within the bound of their codes."""

from __future__ import annotations

import pytest

from kamera import ChunkStore, ReusePolicy
from kamera.ops import KV
from kamera.window import former_of, shown_spans
from tests.reuse.rig import error, family, parts, plain, prompt, reuser, words

NAME = "llama_mqa"
CODES = pytest.mark.parametrize("codec", ["int8", "int4"])


def store_of(codec: str) -> ChunkStore:
    """Holds a, b and c in codes, each with its patch."""
    store = ChunkStore.open("memory://", kv=codec)  # type: ignore[arg-type]
    a, b, c, _, question = parts()
    reuser(family(NAME), store).prepare(prompt(a, b, c, question)).run()
    return store


def largest(found: KV, wanted: KV) -> float:
    pairs = zip(found, wanted, strict=True)
    return max(float((one[n] - other[n]).abs().max()) for one, other in pairs for n in one)


@CODES
def test_coded_segments_are_patched_and_within_their_bound(codec):
    backbone, store = family(NAME), store_of(codec)
    a, b, c, _, question = parts()
    asked = prompt(a, b, c, question)
    plan = reuser(backbone, store).prepare(asked)
    assert [(x.tier, x.guarantee) for x in plan.admissions] == [("patched", "patched")] * 3
    done = plan.run()
    assert done.report.forwards == 0
    assert [x.tier for x in done.admissions] == ["patched"] * 3
    fresh = reuser(backbone, policy=ReusePolicy.exact()).prepare(asked).run().window
    _, lead, *rest = zip(shown_spans(done.window), shown_spans(fresh), strict=True)  # behind the anchor
    record = store.get_canonical(former_of(done.window).context, done.window[0].chunk_id)
    assert record.loss is not None and record.loss.largest > 0
    off = largest(lead[0].kv, lead[1].kv)
    assert 0 < off <= record.loss.largest * 1.001 + 1e-6
    assert all(largest(own.kv, true.kv) < 1e-3 for own, true in rest)  # repaired in full


@CODES
def test_an_exact_policy_serves_nothing_out_of_codes(codec):
    backbone, store = family(NAME), store_of(codec)
    a, b, c, _, question = parts()
    asked = prompt(a, b, c, question)
    plan = reuser(backbone, store, ReusePolicy.exact()).prepare(asked)
    assert {x.tier for x in plan.admissions} == {"none"}
    done = plan.run()
    assert {s.guarantee for s in done.window.slots} == {"exact"}
    assert error(done.window.next_token_logits(done.question), plain(backbone, asked)) < 1e-4


@CODES
def test_an_edited_segment_takes_no_head_out_of_codes(codec):
    """KV that was just computed is exact in any store; what comes back out of codes is not."""
    backbone, store = family(NAME), store_of(codec)
    a, _, _, _, question = parts()
    one = reuser(backbone, store)
    one.prepare(prompt(a, question)).run()  # a leads, out of codes
    plan = one.prepare(prompt(a[:10], words(3, 5), question))
    assert (plan.admissions[0].tier, plan.admissions[0].head) == ("none", 0)
    done = plan.run()
    asked = prompt(a[:10], words(3, 5), question)
    assert error(done.window.next_token_logits(done.question), plain(backbone, asked)) < 1e-4
