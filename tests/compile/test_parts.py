"""Order and division of a plan change nothing: not a byte of what is stored, and of one run no count."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from kamera import ChunkStore
from kamera.compile import CompileJob, ObjectCounts, Settings, read_plan, run_plan
from kamera.errors import StoreError
from tests.compile.same import contents
from tests.compile.saved import pictures, vision_backbone, write_plan

ORBITS = Settings(rank=4, orbit=True)
COUNTED = ("windows", "chunks", "canonicals", "patches", "orbits", "saved_tokens")


@pytest.fixture
def frames(tmp_path) -> list[list]:
    return [[{"image": name}, f"picture {name}\n"] for name in pictures(tmp_path, 5)]


def windows_of(frames) -> list[list]:
    a, b, c, d, e = frames
    return [[a, b, c], [b, a], [a, b], [a, c, d], [b, a, c, d], [e], [a, b, c, e], [c, b, a, d]]


def compiled(folder, plan, settings=ORBITS):
    with ChunkStore.open(folder) as store:
        job = CompileJob(plan, vision_backbone(), store, settings)
        done = sum(step.units for step in job.steps())
        assert done == job.units
        return contents(store), job.report()


def test_the_order_of_the_lines_changes_no_byte_and_no_count(tmp_path, frames):
    windows = windows_of(frames)
    rng = random.Random(0)
    seen = []
    for i in range(2):
        path = write_plan(tmp_path, *rng.sample(windows, len(windows)), name=f"{i}.jsonl")
        found, report = compiled(tmp_path / f"s{i}", read_plan(path))
        seen.append((found, report.forwards, report.tokens, {n: asdict(report)[n] for n in COUNTED}))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) > 15


def test_every_antecedent_list_is_prefilled_once(tmp_path, frames):
    windows = windows_of(frames)
    plan = read_plan(write_plan(tmp_path, *windows))
    _, report = compiled(tmp_path / "s", plan, Settings(rank=4))
    ids = [tuple(map(str, w)) for w in windows]
    prefixes = {w[:n] for w in ids for n in range(2, len(w) + 1)}
    # the anchor, every chunk behind it alone, and every list of two or more; a leading chunk is its canonical
    assert report.forwards == 1 + len({chunk for w in ids for chunk in w}) + len(prefixes)
    assert report.patches.formed == len(prefixes)


def test_several_prompts_prefill_each_anchor_once(tmp_path, frames):
    a, b, *_ = frames
    path = tmp_path / "plan.jsonl"
    lines = [
        write_plan(tmp_path, w, system=s, name="one.jsonl").read_text()
        for w, s in [([a, b], "One."), ([a, b], "Two."), ([b, a], "One."), ([b, a], "Two.")]
    ]
    path.write_text("".join(lines))
    _, report = compiled(tmp_path / "s", read_plan(path), Settings(rank=4))
    assert report.forwards == 2 * (1 + 2 + 2)
    assert report.patches == ObjectCounts(formed=4)


def test_parts_of_a_plan_leave_byte_for_byte_what_the_whole_leaves(tmp_path, frames):
    windows, settings = windows_of(frames), Settings(rank=4)
    want, whole = compiled(tmp_path / "one", read_plan(write_plan(tmp_path, *windows)), settings)
    encodes = 0
    for i, part in enumerate((windows[1::2], windows[::2])):
        plan = read_plan(write_plan(tmp_path, *part, name=f"{i}.jsonl"))
        got, report = compiled(tmp_path / "many", plan, settings)
        encodes += report.vision_encodes
    assert got == want and encodes == whole.vision_encodes == 5


def test_failures_are_named_by_line_and_place(tmp_path, frames):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    a, b, c, d, _ = frames
    bad = {"image": "bad.png"}
    plan = read_plan(write_plan(tmp_path, [a, b, bad, c], [bad], [a, b], [d, c, bad], [d, c, b]))
    _, report = compiled(tmp_path / "one", plan)
    assert [f.error.split(":")[0] for f in report.failures] == ["chunks[2]", "chunks[0]", "chunks[2]"]
    assert report.canonicals == ObjectCounts(formed=4, reused=6, skipped=3)
    assert report.patches == ObjectCounts(formed=3, reused=2, skipped=3)
    assert report.orbits == ObjectCounts(formed=3, reused=2, skipped=3)


def test_a_damaged_stored_chunk_fails_only_its_lines(tmp_path, frames):
    a, b, c, *_ = frames
    with ChunkStore.open(tmp_path / "s") as store:
        run_plan(read_plan(write_plan(tmp_path, [a], [b], [c])), vision_backbone(), store)
        ids = [info.chunk_id for info in store.ls("canonical")]
        (path,) = (tmp_path / "s").rglob(f"{store.ls('canonical')[1].key}.safetensors")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        x, y, z = ({"chunk_id": chunk_id} for chunk_id in ids)
        plan = read_plan(write_plan(tmp_path, [x, y, z], [x, z], [x, y]))
        report = run_plan(plan, vision_backbone(), store)
    assert [f.where.rpartition(":")[2] for f in report.failures] == ["1", "3"]
    assert report.patches == ObjectCounts(formed=1, skipped=3)


def test_a_report_may_be_asked_for_at_any_time(tmp_path, frames):
    plan = read_plan(write_plan(tmp_path, *windows_of(frames)))
    with ChunkStore.open(tmp_path / "s") as store:
        job = CompileJob(plan, vision_backbone(), store, ORBITS)
        seen = []
        for step in job.steps():
            report = job.report()
            counts = (report.canonicals, report.patches, report.orbits)
            seen.append(sum(sum(asdict(c).values()) for c in counts))
            assert step.doing in ("canonicals", "patches")
    assert seen == sorted(seen)
    assert seen[-1] == job.chunks + 2 * (job.chunks - len(plan.windows))


def test_a_store_that_fails_ends_the_run(tmp_path, frames):
    plan = read_plan(write_plan(tmp_path, *windows_of(frames)))
    (tmp_path / "s").mkdir()
    with ChunkStore.open(tmp_path / "s") as store:
        (tmp_path / "s" / "tmp").rmdir()
        (tmp_path / "s" / "tmp").touch()
        job = CompileJob(plan, vision_backbone(), store, ORBITS)
        with pytest.raises(StoreError):
            list(job.steps())
