"""A scene against the plain model over the whole sequence, and against its own slow way."""

import pytest
import torch

from kamera.errors import EmptyChunk, InvalidPermutation
from kamera.ops import check_kv, factor, kv_slice
from lab import scene as scenes
from lab.scene import Scene
from tests.engines.compare import relative, worst
from tests.lab.scenes import FAMILIES, chunks_of, fresh, questions, scene_of
from tests.models import tiny
from tests.window.rig import SYSTEM, Prefilled, same_bits

family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@family
def test_conditioned_and_context_equal_the_plain_model(family):
    scene = scene_of(family)
    plain = Prefilled(scene.backbone, [*scene.antecedents, scene.target])
    assert worst(scene.conditioned, plain.kv(3)) <= 1e-5
    start = scene.anchor.length
    for i, chunk in enumerate(scene.antecedents):
        stop = start + chunk.num_tokens
        assert worst(kv_slice(scene.context, start, stop), plain.kv(i)) <= 1e-5
        start = stop
    alone = Prefilled(scene.backbone, [scene.target])
    assert worst(scene.canonical, alone.kv(0)) <= 1e-5


@pytest.mark.parametrize("family", tiny.of_each_kind(tiny.FAMILIES))
def test_batched_questions_answer_as_the_plain_model(family):
    scene = scene_of(family)
    asked = questions(4, 6, 4, 4, 6)
    together = scene.logits(scene.conditioned, asked)
    for question, got in zip(asked, together, strict=True):
        (alone,) = scene.logits(scene.conditioned, [question])
        assert relative(got, alone) <= 1e-5
        plain = Prefilled(scene.backbone, [*scene.antecedents, scene.target], question)
        assert relative(got, plain.logits) <= 1e-4


def test_batches_of_questions_shrink_with_large_caches(monkeypatch):
    scene = scene_of("qwen2_5_vl")
    asked = questions(4, 4, 4, 6)
    together = scene.logits(scene.blind, asked)
    monkeypatch.setattr(scenes, "BATCH_BYTES", 1)
    with scene.backbone.measure() as work:
        alone = scene.logits(scene.blind, asked)
    assert work.forwards == 4
    assert relative(together, alone) <= 1e-5


@family
def test_logits_follow_the_given_kv_and_asking_changes_nothing(family):
    scene = scene_of(family)
    asked = questions(4, 4)
    before = scene.logits(scene.blind, asked)
    assert relative(scene.logits(scene.conditioned, asked), before) > 1e-3
    assert torch.equal(scene.logits(scene.blind, asked), before)


@family
def test_delta_takes_the_canonical_to_the_conditioned(family):
    scene = scene_of(family)
    assert any(scene.offset)
    assert worst(scene.patched(scene.patch), scene.conditioned) <= 1e-5
    assert worst(scene.patched(None), scene.blind) == 0.0
    assert worst(scene.blind, scene.conditioned) > 1e-2


def test_alone_behind_the_anchor_nothing_is_lost():
    scene = scene_of("qwen2_5_vl").behind([])
    assert scene.offset == (0, 0, 0)
    assert worst(scene.blind, scene.conditioned) <= 1e-6


@family
def test_budget_is_the_bytes_of_a_plain_patch(family):
    scene = scene_of(family)
    tokens = scene.target.num_tokens
    for rank in (1, 4, 1000):
        drawn = [factor(torch.randn(tokens, c.features), rank) for s in scene.layout for c in s.channels]
        assert scene.budget(rank) == sum(f.nbytes for f in drawn)
    check_kv(scene.canonical, scene.layout)
    wanted = sum(4 * tokens * c.features for s in scene.layout for c in s.channels)
    assert scene.chunk_bytes == wanted
    with pytest.raises(ValueError, match="-1 is negative"):
        scene.budget(-1)


# -- siblings --------------------------------------------------------------------------------------


@family
def test_siblings_equal_scenes_made_afresh(family):
    scene = scene_of(family)
    a, b, c = scene.antecedents
    for sibling, antecedents in (
        (scene.reordered([2, 0, 1]), (c, a, b)),
        (scene.behind([b]), (b,)),
        (scene.behind([a, b, c, a]), (a, b, c, a)),
    ):
        assert sibling.antecedents == antecedents
        other = fresh(scene, antecedents)
        assert worst(sibling.conditioned, other.conditioned) <= 1e-5
        assert worst(sibling.context, other.context) <= 1e-5
        assert torch.equal(sibling.positions, other.positions)


def test_siblings_share_vision_canonicals_and_prefix():
    scene = scene_of("qwen3_vl")
    assert len(scene.delta) == len(scene.layout)
    with scene.backbone.measure() as work:
        swapped = scene.reordered([0, 2, 1])
        assert swapped.delta and swapped.context and swapped.canonical is scene.canonical
    assert (work.vision_encodes, work.forwards) == (0, 3)  # two antecedents and the target
    with scene.backbone.measure() as work:
        assert scene.reordered([0, 2, 1]) is swapped and swapped.delta
    assert work.forwards == 0
    assert scene.reordered([0, 1, 2]) is scene


def test_a_siblings_work_leaves_the_scene_as_it_was():
    scene = scene_of("kimi_k25")
    kept = [[{n: t.clone() for n, t in layer.items()} for layer in kv] for kv in (scene.context, scene.blind)]
    conditioned = scene.conditioned
    scene.reordered([2, 1, 0]).logits(scene.blind, questions(4))
    assert same_bits(kept[0], scene.context) and same_bits(kept[1], scene.blind)
    assert scene.conditioned is conditioned


@pytest.mark.parametrize(("count", "others"), [(0, 0), (1, 0), (2, 1), (3, 5), (4, 23), (5, 24)])
def test_other_orders_hold_the_served_one_out(count, others):
    scene = scene_of("llama_mqa", count)
    assert len(set(scene.other_orders)) == len(scene.other_orders) == others
    assert tuple(range(count)) not in scene.other_orders


def test_an_order_that_shows_the_same_chunks_is_the_served_one():
    scene = scene_of("llama_mqa")
    a, b, _ = scene.antecedents
    shown = {tuple([a, b, a][i].label for i in order) for order in scene.behind([a, b, a]).other_orders}
    assert shown == {("p1", "p1", "p2"), ("p2", "p1", "p1")}
    with pytest.raises(ValueError, match="2 antecedents in no second order"):
        _ = scene.behind([a, a]).orbit


def test_an_anchor_prefilled_before_serves_every_scene():
    scene = scene_of("glm4v")
    with scene.backbone.measure() as work:
        other = Scene(scene.backbone, scene.anchor, scene.antecedents, scene.target)
    assert work.forwards == 0
    assert same_bits(other.canonical, scene.canonical)


def test_wrong_orders_and_empty_questions_are_named():
    scene = scene_of("llama_mqa")
    with pytest.raises(InvalidPermutation, match=r"\[0, 0, 1\] is no permutation of 3"):
        scene.reordered([0, 0, 1])
    with pytest.raises(EmptyChunk, match="question 1 has no tokens"):
        scene.logits(scene.blind, [SYSTEM, SYSTEM[:0]])


def test_a_text_target_is_served_like_a_picture():
    backbone, chunks = chunks_of("qwen2_5_vl")
    scene = Scene(backbone, SYSTEM, chunks[:-1], chunks[-1])
    plain = Prefilled(backbone, chunks)
    assert worst(scene.conditioned, plain.kv(3)) <= 1e-5
    assert worst(scene.patched(scene.patch), plain.kv(3)) <= 1e-5
