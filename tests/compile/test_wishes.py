"""What a line asks to be formed: rank, layers and orbit patches of its own, and who else is served by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kamera import ChunkStore
from kamera.compile import ObjectCounts, Settings, read_plan, run_plan
from tests.compile.saved import SYSTEM, pictures, vision_backbone


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


def test_a_patch_has_factors_in_the_layers_asked_for_and_says_so(tmp_path, store, frames):
    run_plan(plan_of(tmp_path, (frames[:3], {"layers": "1:2"})), vision_backbone(), store)
    got = held(store)
    assert [layers for _, layers, _ in got.values()] == [[1], [1]]
    assert [info["asked_layers"] for _, _, info in got.values()] == [[1], [1]]
    # most of this model's deficit is in layer 2: what is left out shows in the energy kept
    assert all(info["energy"] < 0.9 for _, _, info in got.values())


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
