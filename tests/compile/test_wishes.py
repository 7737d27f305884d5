"""What a line asks to be formed: rank, layers and orbit patches of its own, and who else is served by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.compile import ObjectCounts, PlanError, Settings, read_plan, run_plan
from kamera.window import grounds_of, terms_in_force
from tests.compile.saved import SYSTEM, pictures, vision_backbone
from tests.compile.test_parts import compiled
from tests.window.certificates import certificate


@pytest.fixture
def store(tmp_path):
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def frames(tmp_path) -> list[list]:
    return [[{"image": str(tmp_path / name)}, f"picture {name}\n"] for name in pictures(tmp_path, 4)]


def plan_of(folder: Path, *lines: tuple[list, dict], name: str = "plan.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps({"system": SYSTEM, "chunks": c} | w) + "\n" for c, w in lines))
    return read_plan(path)


def held(store: ChunkStore, kind: str = "exact") -> dict[int, tuple[int, list[int], dict]]:
    """Of each patch, by how many chunks it stands behind: rank, layers with factors, info."""
    records = [store.get_patch(i.context, i.chunk_id, i.antecedents, kind) for i in store.ls(kind)]
    return {
        len(r.antecedents): (r.patch.rank, [n for n, layer in enumerate(r.patch.layers) if layer], r.info)
        for r in records
    }


def filled(store, frames, **policy) -> KameraWindow:
    window = KameraWindow(vision_backbone(), store, SYSTEM, policy=ReusePolicy(forms="always", **policy))
    for frame in frames:
        window.append(frame)
    return window


def test_a_patch_has_factors_in_the_layers_asked_for_and_says_so(tmp_path, store, frames):
    run_plan(plan_of(tmp_path, (frames[:3], {"layers": "1:2"})), vision_backbone(), store)
    got = held(store)
    assert [layers for _, layers, _ in got.values()] == [[1], [1]]
    assert [info["asked_layers"] for _, _, info in got.values()] == [[1], [1]]
    # most of this model's deficit is in layer 2: what is left out shows in the energy kept
    assert all(info["energy"] < 0.9 for _, _, info in got.values())


def test_a_patch_of_fewer_layers_is_a_miss_for_who_wants_all(tmp_path, store, frames):
    run_plan(plan_of(tmp_path, (frames[:2], {"layers": [1]})), vision_backbone(), store)
    backbone = vision_backbone()
    with backbone.measure() as work:
        window = filled(store, frames[:2], layers=[1], minimum="patched")
    assert [s.guarantee for s in window.slots] == ["exact", "patched"]
    assert work.forwards == 0
    with backbone.measure() as work:
        window = filled(store, frames[:2], layers="1:3")
    assert [s.guarantee for s in window.slots] == ["exact", "exact"]
    assert work.forwards == 1
    assert held(store)[1][1] == [1, 2]  # the miss formed what was asked for
    with backbone.measure() as work:
        window = filled(store, frames[:2])
    assert work.forwards == 1
    assert held(store)[1][1] == [0, 1, 2]
    assert "asked_layers" not in held(store)[1][2]
    with backbone.measure() as work:  # and who wants some is served by all
        filled(store, frames[:2], layers=[2])
    assert work.forwards == 0


def test_a_policy_of_layers_is_saved_and_checked(tmp_path, store, frames):
    window = filled(store, frames[:2], layers="1:3")
    window.save(tmp_path / "window")
    again = KameraWindow.load(tmp_path / "window", vision_backbone(), store)
    assert (
        terms_in_force(again).served
        == terms_in_force(window).served
        == ReusePolicy(layers=[2, 1], tolerance=None, forms="always")
    )
    with pytest.raises(ValueError, match="layer 7 of a model of 3 layers"):
        filled(store, [], layers=[7])
    with pytest.raises(ValueError, match="layers '3:1'"):
        ReusePolicy(layers="3:1")


def test_lines_that_share_a_place_get_the_least_that_meets_both(tmp_path, frames):
    a, b, c, d = frames
    lines = [
        ([a, b, c], {"rank": 2, "layers": [1]}),
        ([a, b, d], {"rank": 4, "layers": [2]}),
        ([b, a], {}),
    ]
    seen = []
    for name, chosen in (("one", lines), ("two", lines[::-1])):
        plan = plan_of(tmp_path, *chosen, name=f"{name}.jsonl")
        seen.append(compiled(tmp_path / name, plan, Settings(rank=3)))
    assert seen[0][0] == seen[1][0]
    with ChunkStore.open(tmp_path / "one") as store:
        patches = [store.get_patch(i.context, i.chunk_id, i.antecedents) for i in store.ls("exact")]
        wide = {
            (len(r.antecedents), r.patch.rank, tuple(n for n, layer in enumerate(r.patch.layers) if layer))
            for r in patches
        }
        assert wide == {(1, 4, (1, 2)), (2, 2, (1,)), (2, 4, (2,)), (1, 3, (0, 1, 2))}
        again = run_plan(plan_of(tmp_path, *lines), vision_backbone(), store, Settings(rank=3))
    assert (again.forwards, again.patches) == (0, ObjectCounts(reused=5))


def test_orbit_patches_are_formed_for_the_lines_that_ask(tmp_path, store, frames):
    a, b, c, d = frames
    lines = [
        ([a, b, c], {"orbit": True, "rank": 2}),
        ([b, a, c], {}),
        ([a, d], {}),
        ([d, a], {"orbit": True}),
    ]
    report = run_plan(plan_of(tmp_path, *lines), vision_backbone(), store, Settings(rank=3))
    assert report.orbits == ObjectCounts(formed=3)
    assert {i.antecedents for i in store.ls("orbit")} == {
        i.antecedents
        for i in store.ls("exact")
        if i.antecedents in {j.antecedents for j in store.ls("orbit")}
    }
    # the job forms them all, but for the line that says no
    lines = [(chunks, {"orbit": False} if i == 2 else {}) for i, (chunks, _) in enumerate(lines)]
    more = run_plan(plan_of(tmp_path, *lines), vision_backbone(), store, Settings(rank=2, orbit=True))
    assert more.orbits == ObjectCounts(formed=1, reused=4)


def test_missing_layers_are_named_before_anything_is_stored(tmp_path, store, frames):
    plan = plan_of(tmp_path, (frames[:1], {}), (frames[:2], {"layers": "0:4"}), (frames[:2], {"layers": [9]}))
    with pytest.raises(PlanError) as refused:
        run_plan(plan, vision_backbone(), store)
    assert [p.split(": ", 1)[0].rpartition(":")[2] for p in refused.value.problems] == ["2", "3"]
    assert "layer 3 of a model of 3 layers" in refused.value.problems[0]
    assert store.ls() == []


def test_no_certificate_covers_a_policy_that_leaves_layers_out():
    held = certificate(vision_backbone(), of_rank=32)
    assert held.difference(grounds_of(vision_backbone(), ReusePolicy().budget)) is None
    refusal = held.difference(grounds_of(vision_backbone(), ReusePolicy(layers="0:3").budget))
    assert "with patches of all layers, the policy corrects layers 0, 1, 2" in str(refusal)
