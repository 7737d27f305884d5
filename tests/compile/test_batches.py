"""Canonicals that share a forward: the store's bytes are those of forwards of their own."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest

from kamera import ChunkStore
from kamera.compile import Batches, CompileJob, ObjectCounts, Settings, SoloTeam, read_plan, run_plan
from tests.compile.same import contents
from tests.compile.saved import pictures, vision_backbone, write_plan
from tests.compile.test_team import Several

ALONE, TWOS = Settings(rank=4, batch=1), Settings(rank=4, batch=2)


@pytest.fixture
def frames(tmp_path) -> list[list]:
    """Twelve chunks of two lengths by turns."""
    small, large = (tmp_path / name for name in ("small", "large"))
    small.mkdir()
    large.mkdir()
    both = [[*pictures(small, 7)], [*pictures(large, 5, cells=3)]]
    named = [(folder / name) for folder, names in zip((small, large), both, strict=True) for name in names]
    return [[{"image": str(path)}, "a picture\n"] for path in sorted(named, key=lambda p: p.name)]


def compiled(folder, plan, settings, team_of=None):
    with ChunkStore.open(folder) as store:
        team = team_of(store) if team_of else SoloTeam(vision_backbone(), store, settings)
        job = CompileJob(plan, team, store, settings)
        done = sum(step.units for step in job.steps())
        assert done == job.units
        return contents(store), job.report()


@contextmanager
def rows_that_see_each_other():
    """The model, but a batch's rows come out a little different from forwards of their own."""
    layer = vision_backbone().decoder.layers[0]

    def mix(module, arguments, output):
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.shape[0] > 1:
            hidden.mul_(1 + 1e-6)
        return output

    hook = layer.register_forward_hook(mix)
    try:
        yield
    finally:
        hook.remove()


def test_a_batched_job_stores_equal_objects_in_fewer_forwards(tmp_path, frames):
    plan = read_plan(write_plan(tmp_path, frames[:2], *([frame] for frame in frames[2:])))
    want, alone = compiled(tmp_path / "alone", plan, ALONE)
    got, report = compiled(tmp_path / "twos", plan, TWOS)
    assert got == want
    assert alone.batches == Batches(0, 0, 0)
    # of seven and five: one pair each to try, then three pairs in one forward each; two are left over
    trials, pairs = report.batches.trials, report.batches.canonicals // 2
    assert report.batches.equal == trials == 2
    assert pairs >= 3
    assert report.forwards == alone.forwards - pairs + trials < alone.forwards
    assert report.canonicals == alone.canonicals == ObjectCounts(formed=12)


def test_where_a_batch_changes_a_bit_every_chunk_goes_alone(tmp_path, frames):
    plan = read_plan(write_plan(tmp_path, *([frame] for frame in frames)))
    with rows_that_see_each_other():
        want, alone = compiled(tmp_path / "alone", plan, ALONE)
        got, report = compiled(tmp_path / "twos", plan, TWOS)
    assert got == want
    assert (report.batches.canonicals, report.batches.equal, report.batches.trials) == (0, 0, 2)
    assert report.forwards == alone.forwards + 2


def test_a_few_chunks_are_not_worth_a_trial(tmp_path, frames):
    plan = read_plan(write_plan(tmp_path, *([frame] for frame in frames[:5])))
    _, report = compiled(tmp_path / "s", plan, TWOS)
    assert report.batches == Batches(0, 0, 0)
    assert report.forwards == 1 + 5


def test_what_was_there_before_changes_no_byte(tmp_path, frames):
    plan = read_plan(write_plan(tmp_path, frames[2:4], *([frame] for frame in frames)))
    want, _ = compiled(tmp_path / "alone", plan, ALONE)
    some = read_plan(write_plan(tmp_path, *([frame] for frame in frames[::3]), name="some.jsonl"))
    compiled(tmp_path / "twos", some, TWOS)
    got, report = compiled(tmp_path / "twos", plan, TWOS)
    assert got == want
    assert report.canonicals == ObjectCounts(formed=8, reused=6)


def test_workers_that_batch_leave_what_one_leaves(tmp_path, frames):
    plan = read_plan(write_plan(tmp_path, frames[:3], *([frame] for frame in frames)))
    want, _ = compiled(tmp_path / "alone", plan, ALONE)
    got, report = compiled(tmp_path / "many", plan, TWOS, lambda store: Several(2, store, TWOS, 0))
    assert got == want
    assert report.canonicals == ObjectCounts(formed=12, reused=3)


def test_a_chunk_described_twice_in_one_batch_is_formed_once(tmp_path, frames):
    twice = []
    for i, (image, text) in enumerate(frames):
        other = shutil.copy(image["image"], tmp_path / f"copy {i}.png")
        twice += [[[image, text]], [[{"image": str(other)}, text]]]
    plan = read_plan(write_plan(tmp_path, *twice))
    _, report = compiled(tmp_path / "s", plan, TWOS)
    assert report.canonicals == ObjectCounts(formed=12, reused=12)
    with ChunkStore.open(tmp_path / "s") as store:
        assert report.bytes_stored == sum(row.bytes for row in store.ls("canonical"))


def test_an_unreadable_chunk_in_a_batch_fails_alone(tmp_path, frames):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    windows = [[frame] for frame in frames]
    windows.insert(3, [{"image": str(tmp_path / "bad.png")}])
    plan = read_plan(write_plan(tmp_path, *windows))
    with ChunkStore.open(tmp_path / "s") as store:
        report = run_plan(plan, vision_backbone(), store, TWOS)
        assert len(store.ls("canonical")) == 12
    assert [f.where.rpartition(":")[2] for f in report.failures] == ["4"]
