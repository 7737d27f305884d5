"""Sampled chunks: a few tokens run behind the new company, the others completed, all in one forward."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.engines import Sampling, Span
from kamera.engines.hf import HfEngine
from kamera.errors import UncertifiedBackbone
from kamera.ops import Design, token_kernel
from kamera.window import Append, Arrange, Evict, former_of, sequence_of
from kamera.window.audit import Served, audit_slot
from kamera.window.steps import Place, Plan, Sample
from tests.engines.compare import worst
from tests.models import tiny
from tests.window.rig import (
    FULL_RANK,
    QUESTION,
    SYSTEM,
    Snapshot,
    borne,
    guarantees,
    live,
    make,
    rig,
    watching,
)

FAMILIES = ("qwen2_5_vl", "deepseek_v3", "qwen3_vl", "mistral_sliding", "deepseek_v32")
POLICY = ReusePolicy(
    minimum="sampled", share=0.3, max_error=1.0, on_leave="repair", on_miss="prefill", certified=False
)


def count(length: int) -> int:
    """Tokens that a share of .3 runs."""
    return round(0.3 * length)


def completion_of(backbone: HfEngine, kv, positions, tokens: int):
    design = Design.of(token_kernel(kv, backbone.layout, positions))
    return design.completion(tokens, positions)


def test_a_chunk_that_is_placed_between_samples_stands_there_in_their_forward():
    backbone, (first, leaving, one, patched, two) = rig("qwen2_5_vl", 5)
    store = ChunkStore.open("memory://")
    policy = ReusePolicy(rank=FULL_RANK, certified=False, tolerance=None)
    former = KameraWindow(backbone, store, SYSTEM, policy=policy)
    for chunk, archive in ((first, "later"), (one, "later"), (patched, "now")):
        former.append(chunk, archive=archive)
    former.flush()
    window = KameraWindow(backbone, store, SYSTEM, policy=dataclasses.replace(POLICY, tolerance=None))
    for chunk in (first, leaving, one, patched, two):
        window.append(chunk)
    window.flush()
    plan = window.plan(Evict(1))
    steps = [(type(step), step.seat.chunk_id) for step in plan.steps if isinstance(step, Place | Sample)]
    assert steps == [(Sample, one.id), (Place, patched.id), (Sample, two.id)]
    with watching(backbone) as seen:
        report = window.run(plan)
    assert seen.forwards == report.forwards == plan.cost.forwards == 1
    assert guarantees(window) == ["exact", "sampled", "patched", "sampled"]
    assert window.slots[2].rank > 0  # it stands on its canonical and patch, not on the KV that it had


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_that_stay_are_sampled_in_one_forward_from_the_kv_that_they_have(family):
    backbone, chunks = rig(family)
    window = make(backbone, None, *chunks, policy=POLICY)
    held = [live(window, i) for i in range(4)]
    stood = sequence_of(window).position_ids
    plan = window.plan_slide()
    with watching(backbone) as seen:
        report = window.slide()
    wanted = [count(chunk.num_tokens) for chunk in chunks[1:]]
    assert (seen.forwards, seen.tokens) == (1, sum(wanted)) == (report.forwards, report.tokens_recomputed)
    assert (plan.cost.forwards, plan.cost.tokens) == (1, sum(wanted))
    assert guarantees(window) == ["sampled"] * 3
    assert [slot.share for slot in window.slots] == [
        n / chunk.num_tokens for n, chunk in zip(wanted, chunks[1:], strict=True)
    ]
    assert all(0.0 < slot.error < 1.0 for slot in window.slots)
    # by hand: the same bases, moved to their new places, and one call of the engine
    now = sequence_of(window).position_ids
    engine, anchor = backbone, window._stage.former.anchor
    spans, parts, start, old = [Span(anchor.kv, None, (0,) * backbone.axes)], [], anchor.length, 0
    old = anchor.length + chunks[0].num_tokens
    for i, (chunk, tokens) in enumerate(zip(chunks[1:], wanted, strict=True), 1):
        length = chunk.num_tokens
        was, place = stood[:, old : old + length], now[:, start : start + length]
        offset = tuple((place - was)[:, 0].tolist())
        spans.append(Span(held[i], None, offset))
        completion = completion_of(backbone, held[i], was, tokens)
        completion = dataclasses.replace(completion, positions=place)
        parts.append(Sampling(backbone.encode(chunk), place, i, completion))
        start, old = start + length, old + length
    behind = engine.live()
    behind.show(spans)
    for i, kv in enumerate(engine.sample(parts, behind)):
        assert worst(live(window, i), kv) <= 1e-4


def test_a_stored_chunk_that_arrives_is_sampled_from_its_canonical():
    backbone, chunks = rig("qwen2_5_vl")
    store = ChunkStore.open("memory://")
    make(backbone, store, *chunks, policy=dataclasses.replace(POLICY, forms="always")).flush()
    window = make(backbone, store, chunks[1], policy=dataclasses.replace(POLICY, minimum="patched"))
    with watching(backbone) as seen:
        report = make(backbone, store, chunks[1], policy=POLICY).append(chunks[0])
    assert (seen.forwards, seen.tokens, seen.encodes) == (1, count(chunks[0].num_tokens), 0)
    assert report.slot.guarantee == "sampled"
    # under a stronger minimum only if a miss asks for it
    assert window.append(chunks[0]).slot.guarantee == "exact"
    window = make(backbone, store, chunks[1], policy=ReusePolicy(on_miss="sample", share=0.3, max_error=1.0))
    assert window.append(chunks[2]).slot.guarantee == "sampled"


def test_what_is_prefilled_between_samples_shares_their_forward():
    backbone, chunks = rig("qwen2_5_vl", 5)
    window = make(backbone, None, *chunks[:4], policy=POLICY)
    with watching(backbone) as seen:
        window.run(Arrange([window[0], chunks[4], window[2], window[3]]))
    wanted = chunks[4].num_tokens + count(chunks[2].num_tokens) + count(chunks[3].num_tokens)
    assert (seen.forwards, seen.tokens) == (1, wanted)
    assert guarantees(window) == ["exact", "exact", "sampled", "sampled"]
    assert window[1].share is None


def test_a_sample_that_leaves_too_much_open_is_refused_by_name_and_prefilled():
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks, policy=dataclasses.replace(POLICY, share="auto", max_error=1e-3))
    report = window.slide()
    assert guarantees(window) == ["exact"] * 3
    assert sum("sample refused" in note and "max_error=0.001" in note for note in report.notes) == 3
    assert report.tokens_recomputed == sum(chunk.num_tokens for chunk in chunks[1:])


@pytest.mark.parametrize("share", ["auto", 0.2, 0.5])
def test_the_share_is_the_policys_or_the_estimates_own(share):
    backbone, chunks = rig("qwen2_5_vl")
    policy = dataclasses.replace(POLICY, share=share, max_error=0.7)
    window = make(backbone, None, *chunks, policy=policy)
    window.evict(1)
    for slot in (slot for slot in window.slots if slot.guarantee == "sampled"):
        assert slot.error <= 0.7
        if share == "auto":
            assert slot.share <= 0.5
        else:
            assert slot.share == round(share * slot.length) / slot.length


def test_pictures_whose_tokens_see_each_other_are_prefilled():
    backbone, chunks = rig("gemma3")
    window = make(backbone, None, *chunks, policy=POLICY)
    window.slide()
    assert guarantees(window)[:2] == ["exact", "exact"]


def test_the_account_equals_hooks_and_a_plan_goes_through_json():
    backbone, chunks = rig("qwen2_5_vl")
    with watching(backbone, later=True) as seen:
        window = make(backbone, None, *chunks, policy=POLICY)
        plan = Plan.from_json(window.plan_slide().to_json())
        assert sum(isinstance(step, Sample) for step in plan.steps) == 3
        window.run(plan)
        window.reorder([1, 0, 2])
        window.flush()
    assert guarantees(window) == ["sampled"] * 3
    assert borne(seen, window.usage())


def test_a_window_with_samples_forks_and_comes_back_bit_for_bit(tmp_path):
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks, policy=POLICY)
    fork = window.fork()
    window.slide()
    before = Snapshot.of(window)
    assert guarantees(fork) == ["exact"] * 4
    fork.slide()
    assert Snapshot.of(fork).matches(window)
    window.save(tmp_path / "w")
    back = KameraWindow.load(tmp_path / "w", backbone, former_of(window).store)
    assert before.matches(back, numbers=False)
    assert [slot.share for slot in back.slots] == [slot.share for slot in window.slots]


def test_a_sample_from_a_canonical_leaves_a_patch_that_a_full_one_outranks():
    backbone, chunks = rig("qwen2_5_vl", 3)
    store = ChunkStore.open("memory://")
    policy = dataclasses.replace(POLICY, forms="always", rank=64, patch_bytes=None)
    for chunk in chunks:
        make(backbone, store, chunk, policy=policy).flush()
    a, b = chunks[:2]
    window = make(backbone, store, a, policy=policy)
    first = window.append(b)
    window.flush()
    (row,) = (row for row in store.ls() if row.kind == "sampled")
    assert (row.sample.tokens, row.sample.error) == (count(b.num_tokens), first.slot.error)
    again = make(backbone, store, a, policy=policy)
    with watching(backbone) as seen:
        second = again.append(b)
    assert seen.forwards == 0
    assert (second.slot.guarantee, second.slot.share) == ("sampled", first.slot.share)
    assert worst(live(again, 1), live(window, 1)) <= 1e-4
    # nobody who did not ask for it is served the patch, and one formed in full is served before it
    plain = make(backbone, store, a, policy=dataclasses.replace(policy, minimum="patched", on_miss="form"))
    assert plain.append(b).slot.guarantee == "exact"
    plain.flush()
    assert make(backbone, store, a, b, policy=policy)[1].guarantee == "patched"


def test_what_was_sampled_from_kv_in_the_window_is_never_stored_nor_named_as_clean():
    backbone, chunks = rig("qwen2_5_vl")
    store = ChunkStore.open("memory://")
    policy = dataclasses.replace(POLICY, forms="always")
    window = make(backbone, store, *chunks[:3], policy=policy)
    window.evict(0)
    window.append(chunks[3])
    window.flush()
    assert guarantees(window)[:2] == ["exact", "sampled"]
    assert not [row for row in store.ls() if row.kind == "sampled"]
    # what was prefilled behind it is stored under a name that no clean window has
    behind = [row.antecedents for row in store.ls() if row.chunk_id == chunks[3].id and row.rank]
    clean = (chunks[1].id, chunks[2].id)
    assert behind and all(antecedents[: len(clean)] != clean for antecedents in behind)


def test_samples_need_a_certificate_of_their_own():
    backbone, chunks = rig("qwen2_5_vl")
    with pytest.warns(UncertifiedBackbone, match="sampled"):
        window = make(
            backbone, None, *chunks, policy=dataclasses.replace(POLICY, certified=True, max_error=0.9)
        )
    window.slide()
    assert "sampled" not in guarantees(window)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"share": 0.0}, "share 0.0 must lie above"),
        ({"share": 0.7}, "share 0.7 must lie above"),
        ({"share": "some"}, "must lie above"),
        ({"max_error": 0.0}, "max_error 0.0 must lie above"),
        ({"minimum": "exact", "on_miss": "sample"}, 'minimum "exact" with on_miss "sample" contradict'),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        ReusePolicy(**wrong)


@pytest.mark.parametrize("broken", [False, True])
def test_an_audit_finds_a_sample_of_foreign_kv(broken):
    backbone, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks, policy=POLICY)
    window.slide()
    kv = live(window, 1)
    if broken:
        for layer in kv:
            for tensor in layer.values():
                tensor.mul_(1.02)
    findings = audit_slot(window._stage, Served(window._state, 1, kv))
    assert all(finding.holds for finding in findings) is not broken


def test_another_kernel_makes_another_window():
    """What the kernel is shows in the KV: a test that no wrong kernel turns red would be blind."""
    backbone = tiny.backbone("qwen2_5_vl")
    _, chunks = rig("qwen2_5_vl")
    window = make(backbone, None, *chunks, policy=POLICY)
    right, wrong = window.fork(), window.fork()
    right.slide()
    with pytest.MonkeyPatch.context() as patch:
        made = Design.completion

        def rolled(self, tokens, positions):
            found = made(self, tokens, positions)
            return dataclasses.replace(found, columns=found.columns.roll(1, 0))

        patch.setattr(Design, "completion", rolled)
        wrong.slide()
    assert worst(live(wrong, 1), live(right, 1)) > 1e-3
    assert not torch.allclose(wrong.next_token_logits(QUESTION), right.next_token_logits(QUESTION), atol=1e-5)


def test_a_plan_runs_nothing_where_the_stored_canonical_is_damaged(tmp_path):
    backbone, chunks = rig("qwen2_5_vl")
    with ChunkStore.open(tmp_path / "s", memory_limit=0) as store:
        for chunk in chunks[:2]:
            make(backbone, store, chunk, policy=dataclasses.replace(POLICY, forms="always")).flush()
        key = next(row.key for row in store.ls("canonical") if row.chunk_id == chunks[1].id)
        (path,) = (tmp_path / "s").rglob(f"*{key}*")
        data = bytearray(path.read_bytes())
        data[-9] ^= 1
        path.write_bytes(data)
        window = make(backbone, store, chunks[0], policy=POLICY)
        with watching(backbone) as seen:
            plan = window.plan(Append(chunks[1]))
        assert seen.forwards == 0
        assert [type(step).__name__ for step in plan.steps] == ["Prefill"]
        assert window.append(chunks[1]).slot.guarantee == "exact"


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_an_audit_bears_what_codes_lose(kv):
    backbone, chunks = rig("qwen2_5_vl")
    store = ChunkStore.open("memory://", kv=kv)
    for chunk in chunks[:2]:
        make(backbone, store, chunk, policy=dataclasses.replace(POLICY, forms="always")).flush()
    window = make(backbone, store, *chunks[:2], policy=POLICY)
    assert guarantees(window)[1] == "sampled"
    findings = audit_slot(window._stage, Served(window._state, 1, live(window, 1)))
    assert [finding.part for finding in findings] == ["first layer", "KV"]
    assert all(finding.holds for finding in findings), findings
