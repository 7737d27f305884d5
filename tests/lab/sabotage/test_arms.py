"""Each arm breaks what its name says and nothing else."""

import pytest
import torch

from kamera.ops import apply_patch, relocate_kv
from lab.sabotage.arms import AXES, Material, blind, sabotage, sound
from tests.engines.compare import worst
from tests.lab.scenes import scene_of
from tests.lab.test_arms import other_chunks

FAMILIES = {"GQA, M-RoPE": "qwen2_5_vl", "MLA": "kimi_k25"}
family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
RANK = 4


def material(family, rank=None):
    """A scene and what arms serve its target from; full rank for None."""
    scene = scene_of(family)
    another = scene.behind(scene.antecedents[:1]).patch
    stale = scene.behind(other_chunks(scene, 2)).patch
    patches = [p if rank is None else p.truncate(rank) for p in (scene.patch, another, stale)]
    return scene, Material(scene.canonical, patches[0], scene.layout, scene.offset, *patches[1:], seed=3)


def channels(kv, layout, *, phased):
    """The phased channels of a KV, or the free ones."""
    return [
        layer[c.name] for layer, spec in zip(kv, layout, strict=True) for c in spec.channels
        if (c.rope is not None) is phased
    ]  # fmt: skip


def far(one, other):
    """How far tensors lie apart at most, as a share of the second's norm."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


@family
def test_the_sound_arm_at_full_rank_equals_a_reprefill(family):
    scene, of = material(family)
    assert worst(sound(of), scene.conditioned) <= 1e-4
    assert worst(blind(of), scene.blind) == 0.0


@family
def test_wrong_turns_are_sound_but_for_the_turn_that_is_missing(family):
    _, of = material(family, RANK)
    arms, axes = sabotage(len(of.offset)), len(of.offset)
    missing = {"not rotated": list(of.offset), "rotated twice": [-way for way in of.offset]}
    if axes == len(AXES):
        missing |= {
            f"axis {AXES[axis]} not rotated": [way if at == axis else 0 for at, way in enumerate(of.offset)]
            for axis in range(axes)
        }
    assert {name for name in arms if "rotated" in name} == set(missing)
    for name, rest in missing.items():
        kv = arms[name](of)
        assert worst(kv, sound(of)) > 1e-3, name
        assert worst(relocate_kv(kv, of.layout, rest), sound(of)) <= 1e-5, name


@family
def test_half_a_patch_leaves_the_other_half_blind(family):
    _, of = material(family, RANK)
    arms = sabotage(len(of.offset))
    for name, phased in (("keys left blind", True), ("values left blind", False)):
        kv = arms[name](of)
        ours = channels(kv, of.layout, phased=phased)
        assert far(ours, channels(blind(of), of.layout, phased=phased)) == 0.0, name
        assert far(ours, channels(sound(of), of.layout, phased=phased)) > 1e-3, name
        rest = channels(kv, of.layout, phased=not phased)
        assert far(rest, channels(sound(of), of.layout, phased=not phased)) == 0.0, name


@family
def test_a_patch_in_the_wrong_frame_is_wrong_in_phased_channels_only(family):
    _, of = material(family, RANK)
    kv = sabotage(len(of.offset))["patch in the wrong frame"](of)
    free = (channels(one, of.layout, phased=False) for one in (kv, sound(of)))
    assert far(*free) == 0.0
    for apart in (sound(of), blind(of)):
        assert far(*(channels(one, of.layout, phased=True) for one in (kv, apart))) > 1e-3


@family
def test_wrong_patches_are_those_they_are_called(family):
    _, of = material(family, RANK)
    arms = sabotage(len(of.offset))
    assert (
        worst(arms["another's patch"](of), apply_patch(of.canonical, of.another, of.layout, of.offset)) == 0
    )
    assert worst(arms["stale patch"](of), apply_patch(of.canonical, of.stale, of.layout, of.offset)) == 0
    drawn = arms["random patch"](of)
    assert worst(drawn, arms["random patch"](of)) == 0.0, "seeded"
    assert worst(drawn, sound(of)) > 1e-3
    for ours, true, base in zip(drawn, sound(of), blind(of), strict=True):
        for name in true:
            change, right = (ours[name] - base[name]).norm(), (true[name] - base[name]).norm()
            assert torch.isclose(change, right, rtol=1e-3, atol=1e-5), name
