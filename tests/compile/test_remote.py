"""Compiling into a Redis: what a directory would hold, and nobody is told that what was lost is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kamera import ChunkStore, KameraWindow
from kamera.compile import CompileJob, ObjectCounts, Settings, read_plan, run_plan
from kamera.compile import job as running
from kamera.errors import StoreError
from kamera.store import StoreAdmin
from tests.compile.same import contents
from tests.compile.saved import SYSTEM, pictures, vision_backbone, write_plan
from tests.servers.redis_server import BINARY, MISSING, RedisServer

SECRET, KEY = b"a secret of acme, 32 bytes long!", b"k" * 32
SETTINGS = Settings(rank=4)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    if BINARY is None:
        pytest.skip(MISSING)
    with RedisServer() as running:
        yield running


@pytest.fixture
def frames(tmp_path) -> list[list]:
    return [[{"image": str(tmp_path / name)}, f"picture {name}\n"] for name in pictures(tmp_path, 4)]


@pytest.fixture
def plan(tmp_path, frames):
    return write_plan(tmp_path, frames[:3], [frames[1], frames[3]])


def directory(folder, plan) -> dict[str, bytes]:
    with ChunkStore.open(folder) as store:
        run_plan(read_plan(plan), vision_backbone(), store, SETTINGS)
        return contents(store)


def test_a_redis_gets_a_directorys_objects_and_fills_windows(tmp_path, server, plan, frames):
    want = directory(tmp_path / "s", plan)
    with ChunkStore.open(server.url()) as store:
        report = run_plan(read_plan(plan), vision_backbone(), store, SETTINGS)
        assert StoreAdmin(store).stats().remote.pending == 0
    with ChunkStore.open(server.url()) as store:
        assert contents(store) == want
        assert report.bytes_stored == sum(i.bytes for i in store.ls() if i.kind in ("canonical", "exact")) > 0
        again = run_plan(read_plan(plan), vision_backbone(), store, SETTINGS)
        assert (again.forwards, again.patches, again.bytes_stored) == (0, ObjectCounts(reused=3), 0)
    with ChunkStore.open(server.url()) as store, vision_backbone().measure() as work:
        window = KameraWindow(vision_backbone(), store, SYSTEM)
        for frame in frames[:3]:
            window.append(frame)
        ids = [{"chunk_id": info.chunk_id} for info in store.ls("canonical")]
    assert work.forwards == 2  # its rank is the policy's own, higher one, but no canonical is missing
    assert work.vision_encodes == 0
    with ChunkStore.open(server.url()) as store:
        path = write_plan(tmp_path, ids, name="ids.jsonl")
        report = run_plan(read_plan(path), vision_backbone(), store, SETTINGS)
    assert (report.failures, report.vision_encodes) == ((), 0)


def test_a_dying_redis_ends_the_job_and_the_next_completes_it(tmp_path, server, plan, monkeypatch):
    want = directory(tmp_path / "s", plan)
    with ChunkStore.open(server.url("timeout=60&retries=0&cooldown=0.1")) as store:
        job = CompileJob(read_plan(plan), vision_backbone(), store, SETTINGS)
        steps = job.steps()
        assert next(steps).doing == "canonicals"
        server.kill()
        monkeypatch.setattr(running, "FLUSH_SECONDS", 0.1)
        with pytest.raises(StoreError, match=r"has not stored . objects: .* not formed again"):
            list(steps)
        server.start()  # empty
    with ChunkStore.open(server.url()) as store:
        run_plan(read_plan(plan), vision_backbone(), store, SETTINGS)
        assert contents(store) == want


# -- the program -----------------------------------------------------------------------------------
