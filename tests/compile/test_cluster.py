"""A plan on Ray: what one process leaves, byte for byte, with a worker killed on the way."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from kamera import ChunkStore
from kamera.compile import PlanError, Settings, read_plan, run_plan
from kamera.compile.cluster import divide, run_on_ray
from kamera.engines.hf import Backbone, HfEngine
from tests.cli.run import kamera
from tests.compile.same import contents
from tests.compile.saved import pictures, vision_backbone, vision_model, write_plan
from tests.models.hooks import add_hooks

SETTINGS = Settings(rank=4)


def needs_ray(test):
    """Ray takes seconds to start."""
    there = importlib.util.find_spec("ray") is not None
    return pytest.mark.slow(pytest.mark.skipif(not there, reason="needs kamera-kv[ray]")(test))


def plan_of(folder: Path) -> Path:
    a, b, c, d, e = ([{"image": name}, f"picture {name}\n"] for name in pictures(folder, 5))
    (folder / "bad.png").write_bytes(b"no picture")
    return write_plan(
        folder, [a, b, c], [b, a], [a, b], [a, c, d], [b, a, c, d], [e, {"image": "bad.png"}], [c, b]
    )


def load(model: Path, deadly: Path) -> HfEngine:
    """The model; the worker that loads it first is killed when it prefills its third chunk."""
    engine = Backbone.from_pretrained(model, dtype="float32").engine
    try:
        deadly.touch(exist_ok=False)
    except FileExistsError:
        return engine
    left = iter(range(2))

    def die(*_: object) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    add_hooks(engine, (engine.model.model.visual.register_forward_hook, die))
    return engine


def test_windows_that_begin_alike_are_one_part(tmp_path):
    plan = read_plan(plan_of(tmp_path))
    parts = divide(plan, 3)
    firsts = [{window.chunks[0] for window in part.windows} for part in parts]
    assert sorted(map(len, firsts)) == [1, 1, 2]  # a; b; c and e
    assert sum(map(len, firsts)) == len(set().union(*firsts))
    assert sorted(w.where for part in parts for w in part.windows) == sorted(w.where for w in plan.windows)
    assert len(divide(plan, 99)) == 4


@needs_ray
def test_workers_leave_what_one_process_leaves_though_one_is_killed(tmp_path):
    plan = read_plan(plan_of(tmp_path))
    with ChunkStore.open(tmp_path / "alone") as store:
        alone = run_plan(plan, vision_backbone(), store, SETTINGS)
        want = contents(store)
    reach = partial(ChunkStore.open, tmp_path / "shared")
    deadly = tmp_path / "taken"
    report = run_on_ray(plan, partial(load, vision_model(), deadly), reach, SETTINGS, 2)
    with reach() as store:
        assert contents(store) == want
    assert deadly.exists()
    names = ("windows", "chunks", "patches", "orbits", "refused", "failures")
    assert [getattr(report, n) for n in names] == [getattr(alone, n) for n in names]


@needs_ray
def test_the_verb_takes_workers_and_refuses_unknown_ids(capsys, tmp_path, monkeypatch):
    plan = plan_of(tmp_path)
    arguments = ("compile", vision_model(), plan, "--rank", "4", "--format", "json", "--store")
    alone = kamera(capsys, *arguments, tmp_path / "alone").document
    monkeypatch.chdir(tmp_path)
    done = kamera(capsys, *arguments[:2], plan.name, *arguments[3:], "shared", "--workers", "2")
    assert done.code == 1, done.err  # the bad picture
    both = done.document
    assert both["failures"] == [{**f, "where": Path(f["where"]).name} for f in alone["failures"]] != []
    for name in ("windows", "chunks", "patches", "saved_tokens"):
        assert both[name] == alone[name]
    with plan.open("a") as lines:
        lines.write(json.dumps({"system": "Another.", "chunks": [{"chunk_id": "0123"}]}))
    reach = partial(ChunkStore.open, tmp_path / "shared")
    loaded = partial(Backbone.from_pretrained, vision_model(), dtype="float32")
    with pytest.raises(PlanError, match="no chunk '0123'") as refused:
        run_on_ray(read_plan(plan), loaded, reach, SETTINGS, 1)
    assert len(refused.value.problems) == 1
