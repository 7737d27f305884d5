"""A plan compiled on Ray with a worker killed on the way, against the same plan in one process.

The size counts windows. Objects are compared byte for byte but for the time they were written at.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kamera import Backbone, ChunkStore, testbed
from kamera.compile import CompileJob, CompileReport, Settings, read_plan, run_plan
from kamera.compile.cluster import Cluster, RayTeam
from kamera.store import StoreAdmin
from kamera.store.codec import Codec

SIZE = 24
WORKERS = 2


def run(size: int, seed: int) -> dict[str, Any]:
    """What differs between the two stores, and what each run took."""
    settings = Settings()
    load = partial(Backbone.from_pretrained, testbed.weights_dir(), dtype="float32")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = random.Random(seed)
        plan = read_plan(_plan(folder, size, rng))
        with ChunkStore.open(folder / "alone") as store:
            alone = run_plan(plan, load(), store, settings)
            want = _contents(store)
            stored = StoreAdmin(store).stats().bytes
        reach = partial(ChunkStore.open, folder / "shared")
        threads = torch.get_num_threads()
        with (
            RayTeam(Cluster(None, WORKERS), load, reach, settings, threads=threads) as team,
            reach() as store,
        ):
            job = CompileJob(plan, team, store, settings)
            # a shard has come back and the others are at work: one of the two workers dies
            moment, killed = rng.randrange(1, WORKERS + 2), 0
            for step in job.steps():
                moment -= step.doing == "patches" and step.units > 0
                if moment <= 0 and not killed:
                    os.kill(team.pids[0], signal.SIGKILL)
                    killed = 1
            report = job.report()
            got = _contents(store)
            damaged = len(StoreAdmin(store).verify().quarantined)
    return {
        "windows": size,
        "objects": len(want),
        "bytes": stored,
        "objects missing": len(want.keys() - got.keys()),
        "objects extra": len(got.keys() - want.keys()),
        "objects that differ": sum(want[key] != got[key] for key in want.keys() & got.keys()),
        "objects damaged": damaged,
        "workers killed": killed,
        "tasks done again": report.reruns,
        "one process": _taken(alone),
        f"ray, {WORKERS} workers": _taken(report),
    }


def _plan(folder: Path, size: int, rng: random.Random) -> Path:
    """Windows of three to five frames, out of a few episodes, many of which begin alike."""
    contents = []
    for number in range(3):
        for n, frame in enumerate(testbed.World(seed=number).episode(0, legends=2, items=2).frames):
            picture = folder / f"{number}-{n}.png"
            frame.image.save(picture)
            contents.append([{"image": picture.name}, {"text": frame.caption}])
    stems = [rng.sample(range(len(contents)), 2) for _ in range(max(1, size // 4))]
    lines = []
    for _ in range(size):
        stem = rng.choice(stems)
        rest = [i for i in rng.sample(range(len(contents)), 3) if i not in stem]
        chunks = [contents[i] for i in [*stem, *rest]]
        lines.append(json.dumps({"system": "You watch a camera.", "chunks": chunks}))
    path = folder / "plan.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def _contents(store: ChunkStore) -> dict[str, bytes]:
    """Every object as a file written at one time."""
    found = {}
    for info in store.ls():
        record = StoreAdmin(store).objects.read(info.key)
        assert record is not None, info
        found[record.key] = Codec().encode(record, 0.0)
    return found


def _taken(report: CompileReport) -> dict[str, Any]:
    return {
        "forwards": report.forwards,
        "tokens": report.tokens,
        "vision encodes": report.vision_encodes,
        "patches formed": report.patches.formed,
        "patches reused": report.patches.reused,
        "failures": len(report.failures),
        "seconds": round(report.seconds, 1),
    }
