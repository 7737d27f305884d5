"""Every arm at the rank where it must be exact, and what it says it stores."""

import dataclasses

import pytest
import torch

from kamera.errors import UnsupportedBackbone
from kamera.ops import (
    apply_patch,
    check_kv,
    deficit,
    form_patch,
    kv_bytes,
    kv_map,
    mean_deficit,
    patch_of,
    relocate_kv,
    uniform_offset,
)
from lab.arms import Blind, MaskOracle, Reprefill, StaleRope, known_arms, parse_arm
from lab.basis import Basis
from lab.repairs import (
    DeepHalf,
    Keep,
    NearPatch,
    OrbitPatch,
    PlainPatch,
    RemovalPatch,
    SharedBasis,
    StalePatch,
    TransferPatch,
    UpdatedPatch,
)
from lab.scene import Scene
from tests.engines.compare import worst
from tests.lab.scenes import FAMILIES, FULL, chunks_of, fresh, questions, scene_of
from tests.models import samples
from tests.window.rig import SYSTEM, Prefilled, same_bits

family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
RANK = 3


def other_chunks(scene: Scene, count: int):
    """Chunks that are not in the scene."""
    texts = [samples.text_ids(4 + i, seed=300 + i) for i in range(count)]
    return tuple(scene.backbone.chunk_from_tensors(t, label=f"new{i}") for i, t in enumerate(texts))


def all_arms(scene: Scene, rank: int):
    """Every arm of ours, told a past where it needs one."""
    before = (*other_chunks(scene, 1), *scene.antecedents)
    return [
        Reprefill(),
        Blind(),
        StaleRope(),
        MaskOracle(),
        PlainPatch(rank),
        OrbitPatch(rank),
        TransferPatch(rank),
        NearPatch(rank, before),
        StalePatch(rank, other_chunks(scene, 2)),
        DeepHalf(rank),
        SharedBasis(rank, Basis.fit([scene.reordered([2, 1, 0])])),
        Keep(before),
        RemovalPatch(rank, before),
        UpdatedPatch(rank, before, old_rank=2),
    ]


# -- exact where they must be ----------------------------------------------------------------------


@family
def test_full_rank_arms_equal_the_reprefill(family):
    scene = scene_of(family)
    before = (*other_chunks(scene, 1), *scene.antecedents)
    plain = Prefilled(scene.backbone, [*scene.antecedents, scene.target])
    asked = questions(5, 7)
    want = scene.logits(Reprefill().serve(scene).kv, asked)
    for arm in (
        PlainPatch(FULL),
        UpdatedPatch(FULL, before, old_rank=2),
        RemovalPatch(FULL, before),
        SharedBasis(FULL, Basis.fit([scene])),
        NearPatch(FULL, scene.antecedents),
        StalePatch(FULL, ()),
        TransferPatch(FULL, tuple(range(3))),
        Keep(scene.antecedents),
    ):
        kv = arm.serve(scene).kv
        assert worst(kv, plain.kv(3)) <= 1e-4, arm.name
        assert float((scene.logits(kv, asked) - want).norm() / want.norm()) <= 1e-4, arm.name


@family
def test_mask_oracle_equals_blind_reuse_up_to_position(family):
    # behind an anchor the oracle sees it from further away than the canonical did
    scene = scene_of(family, system=torch.empty(0, dtype=torch.int64))
    assert any(scene.offset)
    assert worst(MaskOracle().serve(scene).kv, Blind().serve(scene).kv) <= 1e-5
    assert worst(MaskOracle().serve(scene).kv, scene.conditioned) > 1e-2
    anchored = scene_of(family, antecedents=0)
    assert worst(MaskOracle().serve(anchored).kv, Blind().serve(anchored).kv) <= 1e-5


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma3", "lets the tokens of a picture see each other"),
        ("mistral_sliding", "a sliding window of 8 tokens and this one holds"),
        ("unknown", "takes no attention_mask"),
    ],
)
def test_mask_oracle_is_refused_where_a_mask_would_not_say_it(family, why):
    with pytest.raises(UnsupportedBackbone, match=why):
        MaskOracle().serve(scene_of(family))


@family
def test_stale_rope_is_blind_reuse_only_where_nothing_moves(family):
    scene = scene_of(family)
    free = [c.name for c in scene.layout[0].channels if c.rope is None]
    stale, blind = StaleRope().serve(scene).kv, Blind().serve(scene).kv
    assert worst(stale, blind) > 1e-2
    assert all(torch.equal(a[n], b[n]) for a, b in zip(stale, blind, strict=True) for n in free)
    still = scene.behind([])
    assert same_bits(StaleRope().serve(still).kv, Blind().serve(still).kv)


# -- what each patch is ----------------------------------------------------------------------------


@family
def test_patch_equals_one_formed_by_ops_at_that_rank(family):
    scene = scene_of(family)
    patch, _ = form_patch(scene.conditioned, scene.canonical, scene.layout, scene.offset, RANK)
    served = PlainPatch(RANK).serve(scene)
    assert worst(served.kv, scene.patched(patch)) <= 1e-6
    assert served.nbytes == patch.nbytes <= scene.budget(RANK)


def test_orbit_is_the_mean_of_every_order_but_the_served_one():
    scene = scene_of("qwen2_5_vl")
    a, b, c = scene.antecedents
    others = [(a, c, b), (b, a, c), (b, c, a), (c, a, b), (c, b, a)]
    deltas = [fresh(scene, order).delta for order in others]
    want = scene.patched(patch_of(mean_deficit(deltas), RANK, scene.dtype).patch)
    assert worst(OrbitPatch(RANK).serve(scene).kv, want) <= 1e-5
    leaking = scene.patched(patch_of(mean_deficit([*deltas, scene.delta]), RANK, scene.dtype).patch)
    assert worst(leaking, want) > 1e-3


def test_orbit_of_two_is_the_patch_of_the_other_order():
    scene = scene_of("kimi_k25", antecedents=2)
    orbit, transfer = OrbitPatch(RANK).serve(scene), TransferPatch(RANK).serve(scene)
    assert worst(orbit.kv, transfer.kv) <= 1e-5
    assert orbit.nbytes == transfer.nbytes


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_stale_patch_lacks_that_many_antecedents(count):
    scene = scene_of("qwen3_vl")
    replaced = other_chunks(scene, count)
    before = fresh(scene, [*replaced, *scene.antecedents[count:]])
    arm = StalePatch(RANK, replaced)
    assert arm.name == f"stale@3/{count}"
    assert worst(arm.serve(scene).kv, scene.patched(before.patch.truncate(RANK))) <= 1e-5
    error = worst(arm.serve(scene).kv, PlainPatch(RANK).serve(scene).kv)
    assert (error > 1e-3) == (count > 0)
    with pytest.raises(ValueError, match="4 chunks replaced of 3 antecedents"):
        StalePatch(RANK, other_chunks(scene, 4)).serve(scene)


@family
def test_deep_half_patches_the_deeper_layers_and_no_other(family):
    scene = scene_of(family)
    half, full, blind = DeepHalf(FULL).serve(scene).kv, scene.conditioned, scene.blind
    first = (len(scene.layout) + 1) // 2
    assert worst(half, blind, range(first)) == 0.0
    assert worst(half, full, range(first, len(full))) <= 1e-5
    assert worst(half, full) > 1e-2


def test_a_basis_of_other_scenes_costs_only_coefficients():
    backbone, chunks = chunks_of("qwen2_5_vl", 6)
    scene = Scene(backbone, SYSTEM, chunks[1:4], chunks[0])
    others = [Scene(backbone, scene.anchor, chunks[2:5], c) for c in (chunks[1], chunks[5])]
    basis = Basis.fit(iter(others))
    for layer in basis.layers:
        for directions in layer.values():
            eye = torch.eye(directions.shape[1])
            assert torch.allclose(directions.T @ directions, eye, atol=1e-5)
    tokens = scene.target.num_tokens
    errors = []
    for rank in (1, 2, 5):
        served = SharedBasis(rank, basis).serve(scene)
        assert served.nbytes <= scene.budget(rank)
        stored = [
            4 * tokens * min(b.shape[1], rank * (tokens + 32) // tokens) for b in basis.layers[1].values()
        ]
        assert sum(stored) <= served.nbytes
        errors.append(worst(served.kv, scene.conditioned, [1, 2]))
    assert errors[0] > errors[1] > errors[2]
    assert errors[0] < worst(scene.blind, scene.conditioned, [1, 2])


def test_survivors_are_relocated_from_where_they_were_prefilled():
    scene = scene_of("glm4v")
    before = (*other_chunks(scene, 1), *scene.antecedents)
    plain = Prefilled(scene.backbone, [*before, scene.target])
    was = fresh(scene, before)
    offset = uniform_offset(was.positions, scene.positions)
    kept = Keep(before).serve(scene).kv
    assert worst(kept, relocate_kv(plain.kv(4), scene.layout, offset)) <= 1e-5
    assert worst(kept, scene.conditioned) > 1e-2
    closer = [RemovalPatch(r, before).serve(scene).kv for r in (1, 4, FULL)]
    errors = [worst(kv, scene.conditioned, [1, 2]) for kv in (kept, *closer)]
    assert errors == sorted(errors, reverse=True)


def test_update_is_the_old_patch_and_the_best_correction_of_it():
    scene = scene_of("kimi_k25")
    before = (*other_chunks(scene, 1), *scene.antecedents[1:])
    old = fresh(scene, before).patch.truncate(2)
    stale = apply_patch(scene.canonical, old, scene.layout, [0] * len(scene.offset))
    missing = deficit(scene.conditioned, stale, scene.layout, scene.offset)
    refresh = patch_of(missing, RANK, scene.dtype).patch
    served = UpdatedPatch(RANK, before, old_rank=2).serve(scene)
    assert worst(served.kv, apply_patch(stale, refresh, scene.layout, scene.offset)) <= 1e-5
    assert served.nbytes == old.nbytes + refresh.nbytes
    errors = [worst(kv, scene.conditioned, [1, 2]) for kv in (served.kv, scene.patched(old))]
    assert errors[0] < errors[1]


# -- what they say of themselves -------------------------------------------------------------------


@family
def test_arms_give_kv_of_the_layout_and_keep_their_scene(family):
    scene = scene_of(family)
    names = ("canonical", "blind", "conditioned", "context")
    kept = {name: kv_map(getattr(scene, name), torch.clone) for name in names}
    for arm in all_arms(scene, RANK):
        check_kv(arm.serve(scene).kv, scene.layout)
        assert not arm.per_question
    assert all(same_bits(kept[name], getattr(scene, name)) for name in names)


@family
def test_arms_say_what_they_store_and_what_they_run(family):
    scene = scene_of(family)
    survivor = kv_bytes(scene.canonical)
    deep = (len(scene.layout) + 1) // 2
    old = scene.behind((*other_chunks(scene, 1), *scene.antecedents)).patch.truncate(2)
    by_kind = {type(arm): arm.serve(scene) for arm in all_arms(scene, RANK)}
    for kind in (Reprefill, Blind, StaleRope, MaskOracle):
        assert by_kind[kind].nbytes == 0
    for kind in (PlainPatch, OrbitPatch, TransferPatch, NearPatch, StalePatch, SharedBasis):
        assert 0 < by_kind[kind].nbytes <= scene.budget(RANK)
    halves = scene.patch.truncate(RANK).layers[deep:]
    assert by_kind[DeepHalf].nbytes == sum(f.nbytes for layer in halves for f in layer.values())
    assert by_kind[Keep].nbytes == survivor
    assert survivor < by_kind[RemovalPatch].nbytes <= survivor + scene.budget(RANK)
    assert old.nbytes < by_kind[UpdatedPatch].nbytes <= old.nbytes + scene.budget(RANK)
    for kind, served in by_kind.items():
        forward = kind in (Reprefill, MaskOracle)
        assert (served.forwards, served.tokens_recomputed) == (
            (1, scene.target.num_tokens) if forward else (0, 0.0)
        )


def test_arms_are_called_by_name():
    for name in (
        "reprefill",
        "blind",
        "stale-rope",
        "mask",
        "patch@16",
        "best@16",
        "orbit@1",
        "transfer@8",
        "deep-half@4",
    ):
        assert parse_arm(name).name == name
        assert name.partition("@")[0] + ("@m" if "@" in name else "") in known_arms()
    assert parse_arm("patch@16") == PlainPatch(16)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pach@16", r"no arm 'pach@16': known are reprefill, blind, .*patch@m"),
        ("", "no arm '': known are"),
        ("patch", "arm 'patch' has no budget: give a rank of at least 1, as in patch@16"),
        ("patch@0", "has budget '0'"),
        ("patch@-1", "has budget '-1'"),
        ("patch@many", "has budget 'many'"),
        ("patch@", "has budget ''"),
        ("blind@16", "arm 'blind@16' takes no budget: write blind"),
    ],
)
def test_a_name_that_is_none_is_refused_with_the_way_out(text, why):
    with pytest.raises(ValueError, match=why):
        parse_arm(text)


@family
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_the_best_patch_beats_a_plain_one_of_as_many_bytes(family, rank):
    scene = scene_of(family)

    def left_behind(arm):
        served = parse_arm(arm).serve(scene)
        assert served.nbytes <= scene.budget(rank)
        pairs = zip(served.kv, scene.conditioned, strict=True)
        return sum(float((a[n] - b[n]).square().sum()) for a, b in pairs for n in a)

    assert left_behind(f"best@{rank}") < left_behind(f"patch@{rank}")


def test_a_basis_of_another_backbone_or_of_nothing_is_refused():
    scene, other = scene_of("qwen2_5_vl"), scene_of("qwen3_vl")
    basis = Basis.fit([other])
    with pytest.raises(ValueError, match="fit one on this backbone"):
        SharedBasis(RANK, basis).serve(scene)
    with pytest.raises(ValueError, match="one per backbone"):
        Basis.fit([scene, other])
    with pytest.raises(ValueError, match="at least one scene"):
        Basis.fit([])
    assert basis.nbytes == sum(t.numel() * 4 for layer in basis.layers for t in layer.values())


def test_arms_are_values():
    assert dataclasses.replace(PlainPatch(4), rank=8) == PlainPatch(8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PlainPatch(4).rank = 8
