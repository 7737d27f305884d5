"""Kill writers at the n-th call and at random moments; ``size`` is the number of kills.

Children put, replace and delete objects, one or several together, in one store and report what was
acknowledged. After the kill the parent opens the store and holds it against what it must hold: every
acknowledged write is there whole, the interrupted ones are as before or as after, the index says what the
files say, and nothing of the dead writer lies around. Now and then a second child meets the remains instead,
and is killed in turn, maybe while it clears up.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability import rig
from kamera.errors import KameraError
from kamera.store import ChunkStore, StoreAdmin

SIZE: int = 1000
SLOTS = 24
_MESSAGE = struct.Struct("<cBI")
_tell = os.write  # as it is before a child's calls are counted

Point = tuple[str, str, int]
"""Call or statement (or `ANY`), ``before``, ``after`` or ``half`` (of a write), and which one of them."""
ANY = "any"
LONGEST = 25
"""Operations after which a writer ends itself that has not come to its point."""


class Oracle:
    """What each slot may hold: one version after an acknowledged operation, several after a kill."""

    def __init__(self) -> None:
        self.allowed: dict[int, set[int]] = {slot: {0} for slot in range(SLOTS)}

    def outcomes(self, slot: int, version: int) -> set[int]:
        """What the slot may hold after ``version`` was put (0: after it was deleted)."""
        held = self.allowed[slot]
        if version == 0 or rig.is_patch(slot):
            return {version}
        return {v or version for v in held}  # a canonical that is there stays

    def acknowledged(self, slot: int, version: int) -> None:
        self.allowed[slot] = self.outcomes(slot, version)

    def interrupted(self, slot: int, version: int) -> None:
        self.allowed[slot] |= self.outcomes(slot, version)


def run(size: int, seed: int, *, moments: bool = True) -> dict[str, Any]:
    """Kill ``size`` writers; without ``moments`` all of them at a call, and so the same ones every time."""
    rng = random.Random(seed)
    tally: Counter[str] = Counter()
    points: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        ChunkStore.open(root).close()
        oracle = Oracle()
        version = 1
        while tally["kills"] < size:
            both = rng.random() < 0.25  # two writers at once, on slots of their own
            children = [start(root, rng, version + i * 1000, i, 1 + both, moments) for i in range(1 + both)]
            version += 2000
            for child in children:
                child.finish(oracle, tally, points)
            if tally["kills"] >= size or rng.random() < 0.8:
                tally.update(check(root, oracle, verify=rng.random() < 0.05))
    figures = ("kills", "acknowledged", "torn", "lost", "disagreements", "leftovers", "refused", "checks")
    return {name: tally[name] for name in figures} | {"points": dict(sorted(points.items()))}


class Writer:
    """A child and what it reports. Without a point it is killed some seconds after so many operations."""

    def __init__(self, child: int, pipe: int, point: Point | None, wait: tuple[int, float]) -> None:
        self.child = child
        self.pipe = pipe
        self.point = point
        self.wait = wait

    def finish(self, oracle: Oracle, tally: Counter[str], points: Counter[str]) -> None:
        """See it die, at its point or at a moment of the parent's, and learn what it had done."""
        acknowledgements, seconds = self.wait
        begun: dict[int, int] = {}
        done = 0
        while message := os.read(self.pipe, _MESSAGE.size):
            kind, slot, version = _MESSAGE.unpack(message)
            if kind == b"B":
                begun[slot] = version
                continue
            oracle.acknowledged(slot, version)
            del begun[slot]
            done += 1
            if self.point is None and done == acknowledgements:
                time.sleep(seconds)
                os.kill(self.child, signal.SIGKILL)
        os.close(self.pipe)
        for slot, version in begun.items():
            oracle.interrupted(slot, version)
        _, status = os.waitpid(self.child, 0)
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        tally["acknowledged"] += done
        tally["kills"] += died
        tally["refused"] += not died
        if died:
            early = self.point is not None and done < LONGEST
            points[" ".join(map(str, self.point[:2])) if self.point and early else "random"] += 1


def start(root: Path, rng: random.Random, version: int, share: int, shares: int, moments: bool) -> Writer:
    """A child that works on its share of the slots until it is killed."""
    point, early = draw_point(rng, moments)
    seed = rng.random()
    wait = rng.randint(1, 12), rng.random() * 0.01
    reader, writer = os.pipe()

    def work() -> None:
        os.close(reader)
        mine = [slot for slot in range(SLOTS) if slot % shares == share]
        store: list[ChunkStore] = []
        deadly = Deadly(point, lambda: bool(store) or early)
        with rig.around(rig.CALLS, deadly.made):
            store.append(ChunkStore.open(root, memory_limit=0))
            rig.listen(store[0], deadly.said)
            _operate(store[0], random.Random(seed), writer, mine, version)
        if point is not None:
            rig.die()
        signal.pause()

    child = rig.fork(work)
    os.close(writer)
    return Writer(child, reader, point, wait)


def draw_point(rng: random.Random, moments: bool = True) -> tuple[Point | None, bool]:
    """Where a child dies by itself, if it does, and whether opening the store counts already."""
    if rng.random() < 0.4:
        if moments:
            return None, False
        return (ANY, rng.choice(("before", "after")), rng.randint(1, 100)), rng.random() < 0.3
    call = rng.choice(rig.CALLS + rig.STATEMENTS)
    phase = rng.choice(("before", "after", "half") if call == "write" else ("before", "after"))
    return (call, phase, rng.randint(1, 12)), rng.random() < 0.3


def check(root: Path, oracle: Oracle, verify: bool = False) -> Counter[str]:
    """Hold a store that nobody uses against ``oracle``, which knows better afterwards."""
    found: Counter[str] = Counter(checks=1)
    with ChunkStore.open(root, memory_limit=0) as store:
        found["leftovers"] += len(os.listdir(root / "tmp"))
        rows = {int(row.chunk_id, 16): row for row in store.ls()}
        for slot, allowed in oracle.allowed.items():
            try:
                held = rig.get(store, slot)
            except KameraError:
                held = -1
            found["torn"] += held == -1
            found["lost"] += held != -1 and held not in allowed
            row = rows.get(slot)
            told = row is not None and (not rig.is_patch(slot) or row.formed == str(held))
            found["disagreements"] += told != (held != 0)
            oracle.allowed[slot] = {held}
        if verify:
            report = StoreAdmin(store).verify()
            found["torn"] += len(report.quarantined)
            found["disagreements"] += report.orphan_files + report.orphan_rows
    return found


def _operate(store: ChunkStore, rng: random.Random, pipe: int, slots: list[int], first: int) -> None:
    for version in range(first, first + LONGEST):
        several = rng.random() < 0.25  # put together
        chosen = rng.sample(slots, rng.randint(2, 5) if several else 1)
        deletes = not several and rng.random() < 0.3
        told = 0 if deletes else version
        for slot in chosen:
            _tell(pipe, _MESSAGE.pack(b"B", slot, told))
        if deletes:
            StoreAdmin(store).delete(rig.record(chosen[0], 1).key)
        else:
            rig.put(store, chosen, version)
        for slot in chosen:
            _tell(pipe, _MESSAGE.pack(b"A", slot, told))


class Deadly:
    """Calls and statements, the ``point`` among which ends this process. ``armed``: whether one counts."""

    def __init__(self, point: Point | None, armed: Callable[[], bool] = lambda: True) -> None:
        self._name, self._phase, self._left = point or ("", "", 0)
        self._armed = armed
        self._lock = threading.Lock()

    def made(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call to the system, see `rig.around`."""

        def made(*arguments: Any, **named: Any) -> Any:
            if not self._is_last(name):
                return call(*arguments, **named)
            if self._phase == "half":
                call(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
            elif self._phase == "after":
                call(*arguments, **named)
            rig.die()

        return made

    def said(self, word: str, call: Callable[[], Any]) -> Any:
        """A statement to SQLite, see `rig.listen`."""
        if not self._is_last(word):
            return call()
        if self._phase == "after":
            call()
        rig.die()

    def _is_last(self, name: str) -> bool:
        if self._name not in (name, ANY) or not self._armed():
            return False
        with self._lock:  # a batch is written by several threads
            self._left -= 1
            return self._left == 0
