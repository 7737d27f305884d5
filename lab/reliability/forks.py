"""Fork in the middle of other threads' store operations; ``--size`` is how many children there are.

Threads of this process read, write, delete, and open and close a store; meanwhile it forks. Every child
reads objects of more than 1 MiB, puts one and opens the directory again, in stores inherited and new.
At last it is left alive, and this process opens the directory.

A finding: a step of a child that has not ended after `SECONDS` (it hangs), a wrong object, an error that
is not Kamera's, an acknowledged object that is not there afterwards; in the parent, an operation that
fails, or an opening that does not come back while a child lives. A child that is refused by name, in a
store it inherited, is none.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kamera.errors import KameraError
from kamera.ops import kv_of
from kamera.store import CanonicalRecord, ChunkStore, StoreAdmin
from lab.reliability import rig
from lab.reliability.findings import Child, Findings

SIZE: int = 120
SECONDS = 10.0
"""After which a step counts as hanging."""
LARGE = range(100, 104)
"""Slots of objects of more than 1 MiB: their digests are taken by several threads."""
_NUMBERS = 2**19  # float32 of a large object
_SMALL = 40  # slots the parent's threads put and delete
PUT, ANEW = "put", "new: open, read, put"

_OPEN = """
import sys
from kamera.store import ChunkStore, StoreAdmin
with ChunkStore.open(sys.argv[1]) as store:
    report = StoreAdmin(store).verify()
    print(len(store.ls()), len(report.quarantined), report.orphan_files, report.orphan_rows)
"""


def run(size: int, seed: int, *, fresh: bool = True) -> dict[str, Any]:
    """Fork ``size`` children; ``fresh``: have a new process look at what is left."""
    found = Findings()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        with ChunkStore.open(root, memory_limit=0) as store:
            for slot in LARGE:
                store.put(large(slot))
            with _busy(store, root, seed, found):
                acknowledged = [slot for number in range(size) for slot in _one(store, root, number, found)]
            _alive(root, seed, found)
            for slot in acknowledged:
                _held(store, slot, found)
        if fresh:
            _fresh(root, found)
    return found.figures()


def large(slot: int) -> CanonicalRecord:
    """An object of more than 1 MiB whose every number is its slot."""
    return CanonicalRecord(
        chunk_id=rig.chunk(slot),
        context=rig.CONTEXT,
        input_ids=torch.full((2,), slot),
        positions=torch.full((1, 2), slot),
        kv=kv_of([{"k": torch.full((1, 2, _NUMBERS // 2), float(slot))}]),
        info={"version": slot},
    )


def _one(store: ChunkStore, root: Path, number: int, found: Findings) -> list[int]:
    """A child and what becomes of each of its steps; the slots that it has put."""
    told_at = os.pipe()

    def work() -> dict[str, str]:
        steps = _steps(store, root, number)
        return {name: _step(name, step, told_at[1]) for name, step in steps.items()}

    child = Child(work, SECONDS)
    os.close(told_at[1])
    end = child.ended()
    with open(told_at[0], encoding="utf-8") as pipe:
        reached = pipe.read().split("\n")[-2:][0] or "start"
    found.done["children"] += 1
    if end.how != "returned":
        found.add(f"child {end.how}: {reached}", end.why)
        return []
    for name, outcome in end.result.items():
        found.done[outcome if outcome in ("done", "refused by name") else "failed"] += 1
        if outcome not in ("done", "refused by name"):
            found.add(f"child: {name}", outcome)
    puts = {PUT: 1000 + 2 * number, ANEW: 1000 + 2 * number + 1}
    return [slot for name, slot in puts.items() if end.result[name] == "done"]


def _steps(store: ChunkStore, root: Path, number: int) -> dict[str, Callable[[], Any]]:
    slot = LARGE[number % len(LARGE)]
    inherited: dict[str, Callable[[], Any]] = {
        "read 1 MiB": lambda: _read(store, slot),
        PUT: lambda: rig.put(store, 1000 + 2 * number, 7),
        "list": store.ls,
    }
    with_new: dict[str, Callable[[], Any]] = {
        ANEW: lambda: _anew(root, slot, 1000 + 2 * number + 1),
    }
    # half of the children meet the new store first: a hang in one step hides the others
    return {**inherited, **with_new} if number % 2 else {**with_new, **inherited}


def _step(name: str, step: Callable[[], Any], pipe: int) -> str:
    os.write(pipe, f"{name}\n".encode())
    try:
        step()
    except KameraError as error:
        return f"{type(error).__name__}: {error}" if name.startswith("new") else "refused by name"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def _read(store: ChunkStore, slot: int) -> None:
    record = store.get_canonical(rig.CONTEXT, rig.chunk(slot))
    if record is None or rig.version_of(record) != slot:
        raise ValueError(f"slot {slot} is {'absent' if record is None else 'another object'}")


def _anew(root: Path, slot: int, new: int) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        _read(store, slot)
        rig.put(store, new, 7)


def _held(store: ChunkStore, slot: int, found: Findings) -> None:
    try:
        if rig.get(store, slot) != 7:
            found.add("what a child has put is lost or torn", str(slot))
    except KameraError as error:
        found.add("what a child has put is refused", str(error))


@contextlib.contextmanager
def _busy(store: ChunkStore, root: Path, seed: int, found: Findings) -> Iterator[None]:
    """Inside, threads of this process work on the directory."""
    over = threading.Event()
    lock = threading.Lock()

    def again(name: str, operation: Callable[[random.Random], Any]) -> None:
        rng = random.Random(f"{seed} {name}")
        while not over.is_set():
            try:
                operation(rng)
                with lock:
                    found.done[f"parent: {name}"] += 1
            except Exception as error:
                with lock:
                    found.add(f"parent: {name}", f"{type(error).__name__}: {error}")
                time.sleep(0.05)  # it may fail again and again

    def opens(_: random.Random) -> None:
        with ChunkStore.open(root, memory_limit=0) as other:
            other.ls(limit=1)

    works = {
        "read": lambda rng: _read(store, rng.choice(LARGE)),
        "put": lambda rng: rig.put(store, rng.randrange(_SMALL), rng.randrange(1, 1000)),
        "delete": lambda rng: StoreAdmin(store).delete(rig.record(rng.randrange(_SMALL), 1).key),
        "open": opens,
    }
    threads = [threading.Thread(target=again, args=work, daemon=True) for work in works.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(SECONDS)
            if thread.is_alive():
                found.add("a thread of the parent hangs")


def _alive(root: Path, seed: int, found: Findings) -> None:
    """Children forked while other threads open the directory live on; it opens all the same."""
    over = threading.Event()

    def opens() -> None:
        while not over.is_set():
            with contextlib.suppress(KameraError):
                ChunkStore.open(root, memory_limit=0).close()

    threads = [threading.Thread(target=opens, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    rng = random.Random(seed)
    children = []
    for _ in range(20):
        time.sleep(rng.random() * 0.02)
        children.append(rig.fork(signal.pause))
    over.set()
    asked = threading.Thread(target=lambda: ChunkStore.open(root, memory_limit=0).close(), daemon=True)
    asked.start()
    for thread in (*threads, asked):
        thread.join(SECONDS)
    stuck = sum(thread.is_alive() for thread in (*threads, asked))
    found.add("an opening waits for a child that lives", times=stuck)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for thread in (*threads, asked):
        thread.join(SECONDS)
    found.done["children that lived on"] += len(children)


def _fresh(root: Path, found: Findings) -> None:
    """A process that has nothing to do with this one opens what is left."""
    try:
        told = subprocess.run(
            [sys.executable, "-c", _OPEN, str(root)], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        found.add("the directory does not open afterwards")
        return
    if told.returncode:
        found.add("the directory does not open afterwards", told.stderr[-200:])
        return
    listed, *wrong = map(int, told.stdout.split())
    found.done["objects listed afterwards"] = listed
    for name, count in Counter(
        dict(zip(("damaged", "unlisted", "rows of none"), wrong, strict=True))
    ).items():
        found.add(f"afterwards: {name}", times=count)
