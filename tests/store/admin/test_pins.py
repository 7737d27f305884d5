"""Pins hold until they are over, within their cap, and outlive the index."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import PinsFull, StoreError, UnknownChunk
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.disk.keep import PinFile
from kamera.store.pins import PinBook, PinEntry
from tests.store.builders import canonical, is_pinned, patch


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pins(tmp_path: Path, clock: Clock) -> PinBook:
    return PinBook(PinFile(tmp_path), clock)


def test_a_pin_holds_until_its_time_is_over(pins: PinBook, clock: Clock) -> None:
    pins.pin([("a", 10), ("b", 20)], ttl=60)
    pins.pin([("c", 30)])
    clock.now += 59.9
    assert pins.list() == [PinEntry("a", 10, 1060.0), PinEntry("b", 20, 1060.0), PinEntry("c", 30, None)]
    assert is_pinned(pins, "a")
    clock.now += 0.1
    assert pins.list() == [PinEntry("c", 30, None)]
    assert not is_pinned(pins, "a") and is_pinned(pins, "c")


def test_a_pin_over_the_cap_is_refused_and_changes_nothing(pins: PinBook, clock: Clock) -> None:
    assert pins.cap is None
    pins.set_cap(100)
    pins.pin([("a", 60)], ttl=50)
    with pytest.raises(PinsFull, match="140 bytes would be pinned, over the cap of 100"):
        pins.pin([("b", 20), ("c", 60)])
    assert [pin.name for pin in pins.list()] == ["a"]
    pins.pin([("a", 90)], ttl=50)  # once, not 60 and 90
    clock.now += 50
    pins.pin([("b", 100)])  # what is over weighs nothing
    assert [pin.name for pin in pins.list()] == ["b"]
    pins.set_cap(None)
    pins.pin([("c", 1000)])
    assert pins.cap is None and len(pins.list()) == 2


def test_damaged_pins_are_an_error_and_never_nothing_pinned(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s") as store:
        key = store.put(canonical())
        StoreAdmin(store).pin([key])
        StoreAdmin(store).pins.cell.path.write_bytes(b"no database " * 1000)
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
    pins = PinBook(PinFile(path))
    for i in range(10):
        try:
            pins.pin([(f"{me}-{i}", 10)])
        except PinsFull:
            return


def test_processes_that_pin_at_once_keep_the_cap(pins: PinBook) -> None:
    pins.set_cap(105)
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(3)
    takers = [fork.Process(target=take, args=(pins.cell.path.parent, me, ready)) for me in range(3)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join(300)
    assert [taker.exitcode for taker in takers] == [0, 0, 0]
    assert sum(pin.bytes for pin in pins.list()) == 100
