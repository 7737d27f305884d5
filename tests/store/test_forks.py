"""A forked child works on what it opens, is refused by name what its parent opened, and never hangs."""

from __future__ import annotations

import os
import select
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reliability import rig
from kamera import forks
from kamera.errors import ForkedStore
from kamera.store import ChunkStore, StoreAdmin
from tests.store.builders import CHUNK, CONTEXT, canonical, patch

OTHER = "d" * 64
WIDE = torch.arange(2**19, dtype=torch.int32).reshape(1, 2, 2**18)  # 2 MiB: read by several threads
LARGE = canonical(input_ids=torch.arange(2), positions=torch.arange(2).expand(3, 2), kv=({"k": WIDE},))
DEADLINE = 120.0  # seconds; a child that works takes some milliseconds


def in_child(work: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> str:
    """What ``work`` returns in a forked child, or the name of what it raises; ``hung`` past the deadline."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    try:
        meanwhile()
        if not select.select([read], [], [], DEADLINE)[0]:
            return "hung"
        return os.read(read, 65536).decode()
    finally:
        os.close(read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextmanager
def beside(work: Callable[[threading.Event, threading.Event], None]) -> Iterator[threading.Event]:
    """``work(reached, go)`` in a thread that has set ``reached`` by now; it ends once ``go`` is set."""
    reached, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(reached, go))
    thread.start()
    assert reached.wait(DEADLINE)
    try:
        yield go
    finally:
        go.set()
        thread.join()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def is_large(found: Any) -> bool:
    return found is not None and found.kv[0]["k"].numpy().tobytes() == WIDE.numpy().tobytes()


@pytest.fixture
def store(root: Path) -> Iterator[ChunkStore]:
    """A store whose threads have read, and whose connections are open."""
    with ChunkStore.open(root, memory_limit=0) as held:
        held.put(LARGE)
        assert is_large(held.get_canonical(CONTEXT, CHUNK))
        yield held


CALLS: dict[str, Callable[[ChunkStore], object]] = {
    "get": lambda s: s.get_canonical(CONTEXT, CHUNK),
    "put": lambda s: s.put(patch()),
    "has": lambda s: s.has(CONTEXT, CHUNK),
    "info": lambda s: s.info(CONTEXT, CHUNK),
    "ls": lambda s: s.ls(),
    "stats": lambda s: StoreAdmin(s).stats(),
    "census": lambda s: StoreAdmin(s).census(),
    "flush": lambda s: s.flush(),
    "delete": lambda s: StoreAdmin(s).delete(LARGE.key),
    "gc": lambda s: StoreAdmin(s).gc(0),
    "forget": lambda s: StoreAdmin(s).forget(CHUNK),
    "verify": lambda s: StoreAdmin(s).verify(),
    "pin": lambda s: StoreAdmin(s).pin([LARGE.key]),
    "pins": lambda s: StoreAdmin(s).pins.list(),
    "embedding": lambda s: s.embedding(CONTEXT, CHUNK),
    "quarantined": lambda s: StoreAdmin(s).quarantined(),
}


def test_whatever_is_asked_while_threads_hold_locks_is_refused(
    store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_LONGEST", 0.1)  # a fork waits for them, and not for ever

    def held(reached: threading.Event, go: threading.Event) -> None:
        assert store._disk is not None
        with store._memory._lock, store._disk.index._lock, forks.hold_off_forks(), store._disk.locked():
            reached.set()
            go.wait()

    def ask() -> str:
        said = []
        for name, call in CALLS.items():
            try:
                call(store)
                said.append(f"{name} answered")
            except ForkedStore:
                continue
            except BaseException as error:
                said.append(f"{name}: {type(error).__name__}")
        store.close()
        return f"{repr(store)[:11]} {said}"

    with beside(held):
        assert in_child(ask) == "ChunkStore( []"
    assert [info.key for info in store.ls()] == [LARGE.key]


def test_a_child_that_opens_the_store_itself_works(store: ChunkStore, root: Path) -> None:
    def work() -> str:
        with ChunkStore.open(root, memory_limit=0) as own:
            assert is_large(own.get_canonical(CONTEXT, CHUNK))
            own.put(canonical(OTHER))
            return str(len(own.ls()))

    assert in_child(work) == "2"
    assert {info.chunk_id for info in store.ls()} == {CHUNK, OTHER}
    assert StoreAdmin(store).verify().ok == 2


def test_a_child_forked_in_a_transaction_writes_the_same_file(
    store: ChunkStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "_LONGEST", DEADLINE)
    inside = threading.Event()

    def said(word: str, call: Callable[[], object]) -> object:
        done = call()
        if word == "INSERT":
            inside.set()
            time.sleep(0.2)  # a fork that did not wait would fall in here
        return done

    rig.listen(store, said)

    def child() -> str:
        with ChunkStore.open(root) as own:
            own.put(canonical(OTHER))
            return str(len(own.ls()))

    thread = threading.Thread(target=store.put, args=(patch(),))
    thread.start()
    assert inside.wait(DEADLINE)
    assert in_child(child) == "3"
    thread.join()
    assert len(store.ls()) == 3
    with sqlite3.connect(root / "index.sqlite") as db:  # and not in memory, for want of the file's lock
        assert db.execute("SELECT COUNT(*) FROM objects").fetchone() == (3,)
    db.close()
