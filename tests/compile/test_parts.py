"""Order and division of a plan change nothing: not a byte of what is stored, and of one run no count."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from kamera import ChunkStore
from kamera.compile import CompileJob, Settings, read_plan
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


def test_parts_of_a_plan_leave_byte_for_byte_what_the_whole_leaves(tmp_path, frames):
    windows, settings = windows_of(frames), Settings(rank=4)
    want, whole = compiled(tmp_path / "one", read_plan(write_plan(tmp_path, *windows)), settings)
    encodes = 0
    for i, part in enumerate((windows[1::2], windows[::2])):
        plan = read_plan(write_plan(tmp_path, *part, name=f"{i}.jsonl"))
        got, report = compiled(tmp_path / "many", plan, settings)
        encodes += report.vision_encodes
    assert got == want and encodes == whole.vision_encodes == 5
