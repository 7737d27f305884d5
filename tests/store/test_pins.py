"""Pins hold until they are over, within their cap, and outlive the index."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import PinsFull, StoreError, UnknownChunk
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.memory import Pin, Pins
from tests.store.builders import canonical, is_pinned, patch


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "directory", "remote"])
def pins(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Pins]:
    """The pins of a store of each kind, which start anew for each question."""
    urls = {"memory": "memory://", "directory": tmp_path / "s", "remote": f"obstore+file://{tmp_path / 'r'}"}
    with ChunkStore.open(urls[request.param], memory_limit="1GiB") as store:
        held = StoreAdmin(store).pins
        held._clock = clock
        held._most = None
        yield held


A, B, C = ("a" * 64, "b" * 64, "c" * 64)


def test_a_pin_holds_until_its_time_is_over(pins: Pins, clock: Clock) -> None:
    pins.pin([(A, 10), (B, 20)], ttl=60)
    pins.pin([(C, 30)])
    clock.now += 59.9
    assert pins.list() == [Pin(A, 10, 1060.0), Pin(B, 20, 1060.0), Pin(C, 30, None)]
    assert is_pinned(pins, A)
    clock.now += 0.1
    assert pins.list() == [Pin(C, 30, None)]
    assert not is_pinned(pins, A) and is_pinned(pins, C)


def test_a_pin_over_the_cap_is_refused_and_changes_nothing(pins: Pins, clock: Clock) -> None:
    assert pins.cap is None
    pins.set_cap(100)
    pins.pin([(A, 60)], ttl=50)
    with pytest.raises(PinsFull, match="140 bytes would be pinned, over the cap of 100"):
        pins.pin([(B, 20), (C, 60)])
    assert [pin.name for pin in pins.list()] == [A]
    pins.pin([(A, 90)], ttl=50)  # once, not 60 and 90
    clock.now += 50
    pins.pin([(B, 100)])  # what is over weighs nothing
    assert [pin.name for pin in pins.list()] == [B]
    pins.set_cap(None)
    pins.pin([(C, 1000)])
    assert pins.cap is None and len(pins.list()) == 2


def test_damaged_pins_are_an_error_and_never_nothing_pinned(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s") as store:
        key = store.put(canonical())
        StoreAdmin(store).pin([key])
        (tmp_path / "s" / "keep.json").write_bytes(b"no database " * 1000)
        for use in (
            StoreAdmin(store).pins.list,
            lambda: StoreAdmin(store).gc(0),
            lambda: is_pinned(StoreAdmin(store).pins, key),
        ):
            with pytest.raises(StoreError, match="pins"):
                use()
        assert [info.key for info in store.ls()] == [key]


def test_pins_outlive_the_index_and_the_process(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with ChunkStore.open(root) as store:
        kept, gone = store.put(canonical()), store.put(canonical("d" * 64))
        StoreAdmin(store).pin([kept])
    for path in root.glob("index.sqlite*"):
        path.unlink()
    with ChunkStore.open(root) as store:
        assert [removed.key for removed in StoreAdmin(store).gc(0).removed] == [gone]
        assert [info.key for info in store.ls()] == [kept]
        assert StoreAdmin(store).unpin([kept]) == 1
        assert [removed.key for removed in StoreAdmin(store).gc(0).removed] == [kept]


def test_what_is_not_there_or_not_ours_cannot_be_pinned(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with ChunkStore.open(root) as store, ChunkStore.open(root, tenant="acme") as other:
        key = store.put(patch())
        for keys in ([key, "0" * 64], ["0" * 64], ["../pins"]):
            with pytest.raises(UnknownChunk):
                StoreAdmin(store).pin(keys)
        with pytest.raises(UnknownChunk):
            StoreAdmin(other).pin([key])
        assert StoreAdmin(store).pins.list() == []
        StoreAdmin(store).pin([key])
        assert StoreAdmin(other).unpin([key]) == 0
        assert is_pinned(StoreAdmin(store).pins, key)
    with ChunkStore.open("memory://") as memory, pytest.raises(StoreError, match="memory://"):
        StoreAdmin(memory).gc(0)


def take(path: Path, me: int, ready: Any) -> None:
    ready.wait()
    with ChunkStore.open(path) as store:
        for i in range(10):
            try:
                StoreAdmin(store).pins.pin([(f"{me * 16 + i:064x}", 10)])
            except PinsFull:
                return


def test_processes_that_pin_at_once_keep_the_cap(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        pins = StoreAdmin(store).pins
        pins.set_cap(105)
        fork = multiprocessing.get_context("fork")
        ready = fork.Barrier(3)
        takers = [fork.Process(target=take, args=(tmp_path, me, ready)) for me in range(3)]
        for taker in takers:
            taker.start()
        for taker in takers:
            taker.join(300)
        assert [taker.exitcode for taker in takers] == [0, 0, 0]
        assert sum(pin.bytes for pin in pins.list()) == 100
