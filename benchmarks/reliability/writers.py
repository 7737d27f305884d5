"""Many processes and threads on one store; ``size`` is the number of operations of each thread.

First all put the same chunks at the same moment: each must be written once. Then they read, write
and delete: objects of their own, which must be there as acknowledged, and objects of everyone, which
must be whole and of a version that somebody wrote.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.reliability import rig
from kamera.errors import KameraError
from kamera.store import ChunkStore, StoreAdmin

SIZE: int = 100
PROCESSES = 8
THREADS = 2
OWN = 4
SHARED = range(1000, 1008)
ONCE = [slot for slot in range(2000, 2016) if not rig.is_patch(slot)]
SECONDS = 600.0
"""After which a process that has not ended counts as in a deadlock."""


def run(size: int, seed: int) -> dict[str, Any]:
    """Let `PROCESSES` with `THREADS` each do ``size`` operations a thread."""
    tally: Counter[str] = Counter()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        ChunkStore.open(root).close()
        gate, release = os.pipe()
        children = [_child(root, i, size, seed, gate, release) for i in range(PROCESSES)]
        os.close(gate)
        os.close(release)  # all start now
        for child, pipe in children:
            tally["deadlocks"] += not _ended(child, start + SECONDS)
            with open(pipe, encoding="utf-8") as told:
                text = told.read()
            tally.update(json.loads(text) if text else {"failed": 1})
        with ChunkStore.open(root, memory_limit=0) as store:
            report = StoreAdmin(store).verify()
            tally["torn"] += len(report.quarantined)
            tally["disagreements"] += (
                report.orphan_files + report.orphan_rows + (report.ok != len(store.ls()))
            )
            tally["leftovers"] += report.stale + len(os.listdir(root / "tmp"))
    tally["written twice"] = tally["once"] - len(ONCE)
    figures = (
        "operations",
        "torn",
        "lost",
        "disagreements",
        "deadlocks",
        "failed",
        "written twice",
        "leftovers",
    )
    return {
        "processes": PROCESSES,
        "threads of each": THREADS,
        "puts of one chunk": PROCESSES * THREADS,
        **{figure: tally[figure] for figure in figures},
    }


def _put_once(store: ChunkStore, version: int) -> None:
    for slot in ONCE:
        rig.put(store, slot, version)


def _child(root: Path, number: int, size: int, seed: int, gate: int, release: int) -> tuple[int, int]:
    reader, writer = os.pipe()

    def work() -> None:
        os.close(release)
        os.close(reader)
        os.read(gate, 1)
        moves: list[str] = []

        def counted(_: str, call: Any) -> Any:
            def made(source: Any, target: Any, **named: Any) -> None:
                moves.append(str(target))
                call(source, target, **named)

            return made

        with (
            rig.around(("replace",), counted),
            ChunkStore.open(root, memory_limit="1MB") as store,
            ThreadPoolExecutor(THREADS) as pool,
        ):
            list(pool.map(lambda _: _put_once(store, number + 1), range(THREADS)))
            once = {f"{rig.record(slot, 1).key}.safetensors" for slot in ONCE}
            tally = Counter(once=sum(target in once for target in moves))
            threads = [(number * THREADS + i, random.Random(f"{seed} {number} {i}")) for i in range(THREADS)]
            for done in pool.map(lambda thread: _operate(store, thread[0], thread[1], size), threads):
                tally.update(done)
        with open(writer, "w", encoding="utf-8") as told:
            json.dump(tally, told)

    child = rig.fork(work)
    os.close(writer)
    return child, reader


def _operate(store: ChunkStore, me: int, rng: random.Random, size: int) -> Counter[str]:
    """One thread: what went wrong. Its own slots lie from ``me * OWN`` on."""
    found: Counter[str] = Counter()
    own = {slot: 0 for slot in range(me * OWN, (me + 1) * OWN)}
    for version in range(1, size + 1):
        mine = rng.random() < 0.6
        slot = rng.choice(list(own) if mine else SHARED)
        draw = rng.random()
        found["operations"] += 1
        try:
            if draw < 0.5:
                held = rig.get(store, slot)
                found["torn"] += held == -1
                found["lost"] += mine and held != own[slot]
            elif draw < 0.85:
                rig.put(store, slot, version)
                if mine:
                    own[slot] = version if rig.is_patch(slot) else own[slot] or version
            else:
                existed = StoreAdmin(store).delete(rig.record(slot, 1).key)
                found["lost"] += mine and existed != (own[slot] != 0)
                if mine:
                    own[slot] = 0
        except KameraError:
            found["failed"] += 1
    for slot, version in own.items():
        found["lost"] += rig.get(store, slot) != version
    return found


def _ended(child: int, deadline: float) -> bool:
    """Whether a child ended by itself before ``deadline``; afterwards it has ended in any case."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.WIFEXITED(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
