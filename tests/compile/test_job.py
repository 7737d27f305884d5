"""Running plans: what is formed, that nothing is formed twice, and that it is what a window needs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy
from kamera.compile import CompileJob, ObjectCounts, PlanError, Settings, read_plan, run_plan
from kamera.engines.hf import HfEngine
from tests.compile.saved import SYSTEM, pictures, vision_backbone, write_plan
from tests.engines.compare import relative
from tests.models.hooks import hooked

QUESTION = "what is it?"
FULL = Settings(rank=64)  # more than the chunks have tokens


@pytest.fixture
def backbone() -> HfEngine:
    return vision_backbone()


@pytest.fixture
def store(tmp_path):
    with ChunkStore.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def frames(tmp_path) -> list[list]:
    """Four different pictures with captions, as plan content."""
    return [[{"image": str(tmp_path / name)}, f"picture {name}\n"] for name in pictures(tmp_path, 4)]


@contextmanager
def calls(backbone: HfEngine):
    """Calls of the decoder, of the vision tower and of anything at all, by hooks of our own."""
    seen = {"decoder": 0, "tower": 0, "any": 0}
    tower = backbone.model.model.visual

    def count(module, arguments, output):
        seen["any"] += 1
        seen["decoder"] += module is backbone.decoder
        seen["tower"] += module is tower

    with hooked(backbone, *[(m.register_forward_hook, count) for m in backbone.model.modules()]):
        yield seen


def patches(store: ChunkStore) -> dict[tuple, torch.Tensor]:
    """Every patch of a store as one dense vector, by what it is of."""
    found = {}
    for info in store.ls():
        if info.rank is not None:
            record = store.get_patch(info.context, info.chunk_id, info.antecedents, info.kind)
            dense = [f.dense().flatten() for layer in record.patch.layers for f in layer.values()]
            found[info.kind, info.chunk_id, info.antecedents] = torch.cat(dense)
    return found


def objects(path) -> dict:
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*.safetensors")}


# -- what it costs ---------------------------------------------------------------------------------


def test_a_second_run_runs_no_module_of_the_model(tmp_path, backbone, store, frames):
    plan = read_plan(write_plan(tmp_path, frames[:3], [frames[1], frames[0]]))
    settings = Settings(orbit=True)
    with calls(backbone) as first:
        done = run_plan(plan, backbone, store, settings)
    assert (first["decoder"], first["tower"]) == (done.forwards, done.vision_encodes)
    assert done.forwards > 0
    before = objects(tmp_path / "store")
    with calls(backbone) as second:
        again = run_plan(plan, backbone, store, settings)
    assert second["any"] == 0
    assert (again.forwards, again.tokens, again.vision_encodes, again.bytes_stored) == (0, 0, 0, 0)
    assert (again.canonicals, again.patches, again.orbits) == (
        ObjectCounts(0, 5),
        ObjectCounts(0, 3),
        ObjectCounts(0, 3),
    )
    assert objects(tmp_path / "store") == before


def test_a_shared_prefix_is_prefilled_once(tmp_path, backbone, store, frames):
    a, b, c, d = frames
    plan = read_plan(write_plan(tmp_path, [a, b, c], [a, b, d]))
    with calls(backbone) as seen:
        report = run_plan(plan, backbone, store)
    # the anchor and a leading chunk once; every other chunk in context and behind the anchor alone
    assert seen["decoder"] == report.forwards == 1 + 1 + 2 + 2 + 2
    assert seen["tower"] == report.vision_encodes == 4
    assert report.canonicals == ObjectCounts(formed=4, reused=2)
    assert report.patches == ObjectCounts(formed=3, reused=1)


def test_the_report_is_what_the_store_grew_by(tmp_path, backbone, store, frames):
    report = run_plan(read_plan(write_plan(tmp_path, frames)), backbone, store)
    grown = sum(len(data) for data in objects(tmp_path / "store").values())
    shared = sum(info.bytes for info in store.ls() if info.kind in ("encoding", "anchor"))
    assert report.bytes_stored == grown - shared > shared > 0
    assert (report.windows, report.chunks, report.failures) == (1, 4, ())
    assert report.seconds > 0


# -- what it is worth ------------------------------------------------------------------------------


def test_a_compiled_store_fills_windows_without_a_forward(tmp_path, backbone, store, frames):
    run_plan(read_plan(write_plan(tmp_path, frames)), backbone, store, FULL)
    window = KameraWindow(backbone, store, SYSTEM, policy=ReusePolicy(rank=64, forms="always"))
    fresh = KameraWindow(backbone, ChunkStore.open("memory://"), SYSTEM)
    with calls(backbone) as seen:
        for frame in frames:
            window.append(frame)
    assert seen["any"] == 0
    assert [s.guarantee for s in window.slots] == ["exact", "patched", "patched", "patched"]
    for frame in frames:
        fresh.append(frame)
    assert {slot.guarantee for slot in fresh} == {"exact"}
    assert relative(window.next_token_logits(QUESTION), fresh.next_token_logits(QUESTION)) <= 1e-4


def test_patches_are_those_of_windows_that_start_from_nothing(tmp_path, backbone, store, frames):
    """Shared prefixes, rewinding and stored canonicals leave no trace in what is formed."""
    a, b, c, d = frames
    windows = [[a, b, c], [a, b, d, c], [a, c], [b, a], [a, b]]
    # at a low rank, what is formed behind a patched antecedent is not what exact ones give
    for some in (windows[:1], windows):
        run_plan(read_plan(write_plan(tmp_path, *some)), backbone, store, Settings(rank=2))
    want = {}
    for contents in windows:
        alone = ChunkStore.open("memory://")
        window = KameraWindow(backbone, alone, SYSTEM, policy=ReusePolicy(rank=2, forms="always"))
        for content in contents:
            window.append(content)
        window.flush()
        want |= patches(alone)
    got = patches(store)
    assert got.keys() == want.keys()
    assert len(want) == 6
    for key, dense in want.items():
        assert relative(got[key], dense) <= 1e-5
    assert {i.formed for i in store.ls("exact")} == {"exact"}


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_line_with_an_unreadable_picture_fails_alone(tmp_path, backbone, store, frames):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    a, b, c, d = frames
    path = write_plan(tmp_path, [a, b, {"image": "bad.png"}, c], [a, d])
    settings = Settings()
    job = CompileJob(read_plan(path), backbone, store, settings)
    units = sum(step.units for step in job.steps())
    report = job.report()
    (failure,) = report.failures
    assert failure.where == f"{path}:1"
    assert failure.error.startswith("chunks[2]: ")
    assert "bad.png" in failure.error
    assert units == job.units == 5 + job.chunks == 11  # different chunks, and places
    # what can be read has its canonical; nothing is formed behind what cannot
    assert report.canonicals == ObjectCounts(formed=4, reused=1, skipped=1)
    assert report.patches == ObjectCounts(formed=2, skipped=2)
    assert len(store.ls("exact")) == 2


def test_an_unknown_chunk_id_is_refused_before_any_work(tmp_path, backbone, store, frames):
    path = write_plan(tmp_path, [frames[0]], [frames[1], {"chunk_id": "f" * 64}])
    with (
        calls(backbone) as seen,
        pytest.raises(PlanError, match=r"plan\.jsonl:2: chunks\[1\]: no chunk 'ffff"),
    ):
        run_plan(read_plan(path), backbone, store)
    assert seen["any"] == 0
    assert store.ls() == []


# -- which context ---------------------------------------------------------------------------------
