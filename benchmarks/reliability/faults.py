"""Fail every call to the system, one at a time; ``size`` is how many calls of each operation (0: all).

Each operation is run once to count its calls, and then again and again with the first, the second, …
of them failing for want of space, with an I/O error, or for want of permission. Afterwards the
store must hold what it held or what it should hold, say so by `StoreError`, serve everything that
was acknowledged before, and work.
"""

from __future__ import annotations

import errno
import os
import random
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability import rig
from kamera.errors import CorruptChunk, KameraError, StoreError
from kamera.store import ChunkStore, StoreAdmin

SIZE: int = 0
CALLS = (*rig.CALLS, "read", "pread", "preadv", "listdir", "close", "fstat")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
KEPT = (0, 2, 5, 7)
"""Slots that hold version 1 all along; no fault may touch them."""
PATCH, CANONICAL = 8, 10


class Injector:
    """Fails the n-th of all calls with an error; n = 0 only counts."""

    def __init__(self, at: int = 0, error: int = errno.EIO) -> None:
        self.at = at
        self.error = error
        self.calls: list[str] = []
        self._lock = threading.Lock()

    def wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call to the system."""

        def made(*arguments: Any, **named: Any) -> Any:
            if not self._fails(name):
                return call(*arguments, **named)
            if name == "close":  # it fails and closes all the same
                call(*arguments, **named)
            if name == "write" and len(arguments[1]) > 1:  # part of it gets through
                call(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
            raise OSError(self.error, os.strerror(self.error))

        return made

    def said(self, word: str, call: Callable[[], Any]) -> Any:
        """A statement to SQLite."""
        if self._fails(word):
            raise sqlite3.OperationalError("database or disk is full")
        return call()

    def _fails(self, name: str) -> bool:
        with self._lock:  # a batch is written by several threads
            self.calls.append(name)
            return len(self.calls) == self.at


Operation = Callable[[Path, Injector], None]


def run(size: int, seed: int) -> dict[str, Any]:
    """Fail ``size`` calls of each operation, drawn at random, or all of them."""
    rng = random.Random(seed)
    tally: Counter[str] = Counter()
    unexpected: list[str] = []
    rows: dict[str, Any] = {}
    for name, operation in OPERATIONS.items():
        counted = Injector()
        attempt(operation, counted, Counter(), [])
        points = [(at, error) for at in range(1, len(counted.calls) + 1) for error in ERRORS]
        chosen = rng.sample(points, size) if 0 < size < len(points) else points
        for at, error in chosen:
            attempt(operation, Injector(at, error), tally, unexpected)
        rows[name] = {"calls": len(counted.calls), "injected": len(chosen)}
    figures = ("faults", "named errors", "survived", "other errors", "torn", "lost", "disagreements")
    total = {figure: tally[figure] for figure in (*figures, "leftovers", "stuck")}
    return total | {"unexpected": unexpected[:9], "short writes": short_writes(), "operations": rows}


def attempt(operation: Operation, injector: Injector, tally: Counter[str], unexpected: list[str]) -> None:
    """One operation on a store of its own with one fault, and what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        _fill(root)
        tally["faults"] += 1
        try:
            operation(root, injector)
            tally["survived"] += 1
        except StoreError:
            tally["named errors"] += 1
        except Exception as error:
            tally["other errors"] += 1
            unexpected.append(f"call {injector.at}, errno {injector.error}: {error!r}")
        try:
            _check(root, tally)
        except KameraError:
            tally["stuck"] += 1


def short_writes() -> dict[str, int]:
    """Writes that take a few bytes at a time, as the system may: how many, and how many objects are whole."""
    calls = [0]

    def short(_: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(descriptor: int, data: Any) -> int:
            calls[0] += 1
            return int(call(descriptor, memoryview(data)[:200]))

        return made

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        with rig.around(("write",), short):
            _fill(root)
        with ChunkStore.open(root, memory_limit=0) as store:
            return {"writes": calls[0], "whole": sum(rig.get(store, slot) == 1 for slot in KEPT)}


def _fill(root: Path) -> None:
    with ChunkStore.open(root) as store:
        for slot in (*KEPT, PATCH):
            rig.put(store, slot, 1)


def _check(root: Path, tally: Counter[str]) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        tally["leftovers"] += len(os.listdir(root / "tmp"))
        listed = {int(row.chunk_id, 16) for row in store.ls()}
        held = {slot: rig.get(store, slot) for slot in (*KEPT, CANONICAL)}
        try:
            held[PATCH] = rig.get(store, PATCH)
        except CorruptChunk:  # one operation meets damage, and may not get as far as setting it aside
            held[PATCH] = 0
            listed.discard(PATCH)
        tally["torn"] += sum(version == -1 for version in held.values())
        tally["lost"] += sum(held[slot] != 1 for slot in KEPT) + (held[PATCH] not in (0, 1, 2))
        tally["disagreements"] += listed != {slot for slot, version in held.items() if version}
        for slot in (PATCH, CANONICAL):  # the next operations work
            rig.put(store, slot, 2)
        tally["lost"] += rig.get(store, PATCH) != 2 or rig.get(store, CANONICAL) == 0
        tally["lost"] += len(StoreAdmin(store).verify().quarantined)


def _in_use(use: Callable[[ChunkStore], object]) -> Operation:
    """``use`` of a store that is open; afterwards the same handle works on."""

    def operation(root: Path, injector: Injector) -> None:
        with ChunkStore.open(root, memory_limit=0) as store:
            rig.listen(store, injector.said)
            failed: list[BaseException] = []
            with rig.around(CALLS, injector.wrapped):
                try:
                    use(store)
                except KameraError as error:
                    failed.append(error)
            injector.at = 0
            if not all(rig.get(store, slot) == 1 for slot in KEPT):
                raise AssertionError("what was acknowledged is gone")
            rig.put(store, 12, 3)
            if rig.get(store, 12) != 3 or not StoreAdmin(store).delete(rig.record(12, 3).key):
                raise AssertionError("the next operation does not work")
            if failed:
                raise failed[0]

    return operation


def _opening(root: Path, injector: Injector) -> None:
    with rig.around(CALLS, injector.wrapped):
        ChunkStore.open(root).close()


def _making(root: Path, injector: Injector) -> None:
    with rig.around(CALLS, injector.wrapped):
        ChunkStore.open(root / "new").close()


def _damaged(store: ChunkStore) -> None:
    """Meets a damaged object, which must go to quarantine or stay, and never be served."""
    key = rig.record(PATCH, 1).key
    path = Path(store.url) / "objects" / f"{key}.safetensors"
    os.truncate(path, 700)
    try:
        if rig.get(store, PATCH) == 1:
            raise AssertionError("damage was served")
    except StoreError:
        raise
    except KameraError:
        pass


OPERATIONS: dict[str, Operation] = {
    "open": _opening,
    "make": _making,
    "replace": _in_use(lambda store: rig.put(store, PATCH, 2)),
    "put": _in_use(lambda store: rig.put(store, CANONICAL, 2)),
    "put several": _in_use(lambda store: rig.put(store, (PATCH, CANONICAL), 2)),
    "put again": _in_use(lambda store: rig.put(store, KEPT[1], 2)),
    "get": _in_use(lambda store: rig.get(store, PATCH)),
    "get damaged": _in_use(_damaged),
    "delete": _in_use(lambda store: StoreAdmin(store).delete(rig.record(PATCH, 1).key)),
    "verify": _in_use(lambda store: StoreAdmin(store).verify()),
}
