"""A job that was killed goes on where it stopped, and what it leaves is what one run leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from kamera import ChunkStore
from kamera.compile import read_plan, run_plan
from tests.backbones.compare import relative
from tests.compile.saved import pictures, vision_backbone, vision_model, write_plan
from tests.compile.test_job import patches

ROOT = Path(__file__).parents[2]


def test_a_killed_run_is_resumed_and_leaves_what_one_run_leaves(tmp_path):
    names = pictures(tmp_path, 12)
    frames = [[{"image": name}, f"{name}\n"] for name in names]
    path = write_plan(tmp_path, *[frames[i : i + 4] for i in range(9)])
    killed = tmp_path / "killed"
    arguments = ["compile", str(vision_model()), str(path), "--store", str(killed), "--dtype", "float32"]
    child = subprocess.Popen(
        [sys.executable, "-m", "kamera", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        while len(list(killed.glob("objects/*/*.safetensors"))) < 8:
            assert child.poll() is None, child.stderr.read().decode()
            time.sleep(0.002)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stderr.close()
    assert child.returncode == -signal.SIGKILL

    plan, backbone = read_plan(path), vision_backbone()
    with ChunkStore.open(killed) as store:
        resumed = run_plan(plan, backbone, store)
        assert store.verify().quarantined == ()
        got, keys = patches(store), {i.key for i in store.ls()}
    with ChunkStore.open(tmp_path / "whole") as store:
        whole = run_plan(plan, backbone, store)
        want, all_keys = patches(store), {i.key for i in store.ls()}

    assert resumed.failures == ()
    assert 0 < resumed.patches.formed < whole.patches.formed
    assert resumed.forwards < whole.forwards
    assert keys == all_keys
    for name, dense in want.items():
        assert relative(got[name], dense) <= 1e-5
