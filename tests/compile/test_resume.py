"""A job killed at any point goes on where it stopped: nothing stored is done twice or written again."""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest

from kamera import ChunkStore
from kamera.compile import Settings, read_plan, run_plan
from kamera.store import StoreAdmin
from tests.compile.same import contents
from tests.compile.saved import pictures, vision_backbone, write_plan
from tests.killing import Countdown, in_child
from tests.models.hooks import hooked

SETTINGS = Settings(rank=4)
POINTS = {
    "forwards": [
        ("forward", 2, "before"),
        ("forward", 9, "after"),
        ("forward", 1, "after"),
        ("forward", 11, "before"),
        ("forward", 6, "after"),
        ("forward", 3, "before"),
    ],
    "files": [
        ("write", 3, "half"),
        ("fsync", 2, "before"),
        ("replace", 2, "before"),
        ("replace", 3, "after"),
        ("write", 4, "after"),
        ("fsync", 3, "after"),
    ],
}


def run(folder, plan, point=("forward", 0, "before")) -> tuple[bool, int]:
    """Run the job in a forked process that dies at ``point``: was it killed, and the forwards it ended."""
    call, *where = point

    def work(tell):
        backbone = vision_backbone()
        countdown = Countdown(*where)
        decoder = backbone.decoder
        hooks = [(decoder.register_forward_hook, lambda *_: tell(b"."))]
        if call == "forward":
            end, before = countdown.wrap(lambda: None), countdown.phase == "before"
            hang = decoder.register_forward_pre_hook if before else decoder.register_forward_hook
            hooks.append((hang, lambda *_: end()))
        over = nullcontext() if call == "forward" else countdown.over(os, call)
        with ChunkStore.open(folder) as store, hooked(backbone, *hooks), over:
            run_plan(plan, backbone, store, SETTINGS)

    ended = in_child(work)
    return ended.killed, len(ended.told)


def owed(folder, windows, names) -> int:
    """Forwards that are left to do, counted by brute force from the files that are there."""
    with ChunkStore.open(folder) as store:
        anchored = bool(store.ls("anchor"))
        canonicals = {names[i.chunk_id] for i in store.ls("canonical")}
        patches = {
            tuple(names[chunk_id] for chunk_id in (*i.antecedents, i.chunk_id)) for i in store.ls("exact")
        }
    missing = {w[:n] for w in windows for n in range(2, len(w) + 1)} - patches
    on_the_way = {path[:n] for path in missing for n in range(2, len(path) + 1)}
    unmade = {chunk for w in windows for chunk in w} - canonicals
    return bool((missing or unmade) and not anchored) + len(unmade) + len(on_the_way)


def files(folder) -> dict:
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.glob("objects/*.safetensors")}


@pytest.mark.few(1)
@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_a_job_killed_again_and_again_does_nothing_twice(tmp_path, points):
    frames = {name: [{"image": name}, f"{name}\n"] for name in pictures(tmp_path, 7)}
    keys = list(frames)
    windows = [tuple(keys[i : i + 4]) for i in range(4)] + [(keys[0], keys[2]), (keys[0], keys[1], keys[5])]
    plan = read_plan(write_plan(tmp_path, *([frames[key] for key in w] for w in windows)))
    backbone = vision_backbone()
    sources = [c for w in plan.windows for c in w.chunks]
    ids = [backbone.chunk([dict(item) for item in source.items]).id for source in sources]
    names = dict(zip(ids, (key for w in windows for key in w), strict=True))
    with ChunkStore.open(tmp_path / "whole") as store:
        whole = run_plan(plan, backbone, store, SETTINGS)
        want = contents(store)

    folder = tmp_path / "killed"
    ChunkStore.open(folder).close()
    assert owed(folder, windows, names) == whole.forwards
    for point in points:
        before, left = files(folder), owed(folder, windows, names)
        killed, forwards = run(folder, plan, point)
        assert killed, point
        assert forwards <= left
        if point[0] == "forward":
            assert forwards == point[1] - (point[2] == "before")
        after = files(folder)
        assert {path: after[path] for path in before} == before
    assert 0 < len(after) < len(want)  # the last one was killed in the middle
    (folder / "tmp" / "half.1.ab").write_bytes(b"\x10\x20 half an object")
    left = owed(folder, windows, names)
    assert run(folder, plan) == (False, left)
    assert {path: files(folder)[path] for path in after} == after
    with ChunkStore.open(folder) as store:
        assert contents(store) == want
        assert StoreAdmin(store).verify().quarantined == ()
