"""A job killed at any moment goes on where it stopped: nothing stored is done twice or written again."""

from __future__ import annotations

import os
import random
import signal
import time

from kamera import ChunkStore
from kamera.backbones import Observer
from kamera.compile import Settings, read_plan, run_plan
from tests.compile.same import contents
from tests.compile.saved import pictures, vision_backbone, write_plan

KILLS = 6
SETTINGS = Settings(rank=4)


def killed_after(seconds: float | None, folder, plan) -> tuple[bool, int]:
    """Run the job in a forked process, killed after so long (None: not): did it end, and its forwards."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            backbone = vision_backbone()
            backbone.decoder.register_forward_hook(Observer(lambda *_: os.write(writing, b".")))
            with ChunkStore.open(folder) as store:
                run_plan(plan, backbone, store, SETTINGS)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    with open(reading, "rb") as pipe:
        forwards = len(pipe.read())
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status), forwards


def owed(folder, windows, names) -> int:
    """Forwards that are left to do, counted by brute force from the files that are there."""
    with ChunkStore.open(folder) as store:
        canonicals = {names[i.chunk_id] for i in store.ls("canonical")}
        patches = {
            tuple(names[chunk_id] for chunk_id in (*i.antecedents, i.chunk_id)) for i in store.ls("exact")
        }
    missing = {w[:n] for w in windows for n in range(2, len(w) + 1)} - patches
    on_the_way = {path[:n] for path in missing for n in range(2, len(path) + 1)}
    unmade = {chunk for w in windows for chunk in w} - canonicals
    return bool(missing or unmade) + len(unmade) + len(on_the_way)


def files(folder) -> dict:
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.glob("objects/*/*.safetensors")}


def test_a_job_killed_at_random_moments_does_nothing_twice(tmp_path):
    frames = {name: [{"image": name}, f"{name}\n"] for name in pictures(tmp_path, 7)}
    keys = list(frames)
    windows = [tuple(keys[i : i + 4]) for i in range(4)] + [(keys[0], keys[2]), (keys[0], keys[1], keys[5])]
    plan = read_plan(write_plan(tmp_path, *([frames[key] for key in w] for w in windows)))
    backbone = vision_backbone()
    sources = [c for w in plan.windows for c in w.chunks]
    ids = [backbone.chunk([dict(item) for item in source.items]).id for source in sources]
    names = dict(zip(ids, (key for w in windows for key in w), strict=True))

    started = time.perf_counter()
    with ChunkStore.open(tmp_path / "whole") as store:
        whole = run_plan(plan, backbone, store, SETTINGS)
        want = contents(store)
    took = time.perf_counter() - started

    folder, rng = tmp_path / "killed", random.Random(0)
    ChunkStore.open(folder).close()
    assert owed(folder, windows, names) == whole.forwards
    stages = []
    for _ in range(KILLS):
        before, left = files(folder), owed(folder, windows, names)
        ended, forwards = killed_after(rng.uniform(0.1, 0.6) * took, folder, plan)
        assert forwards <= left
        after = files(folder)
        assert {path: after[path] for path in before} == before
        stages.append(len(after))
        if ended:
            break
    (folder / "tmp" / "half.1.ab").write_bytes(b"\x10\x20 half an object")
    left = owed(folder, windows, names)
    before = files(folder)
    ended, forwards = killed_after(None, folder, plan)
    assert ended
    assert forwards == left
    after = files(folder)
    assert {path: after[path] for path in before} == before
    assert any(0 < stage < len(want) for stage in stages), stages  # one was killed in the middle
    with ChunkStore.open(folder) as store:
        assert contents(store) == want
        assert store.verify().quarantined == ()
