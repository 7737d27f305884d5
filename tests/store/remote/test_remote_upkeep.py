"""Upkeep of a remote: pins that every client honours, gc, listings that read little, quarantine."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import PinsFull, RemoteUnavailable, StoreError, UnknownChunk
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.pins import PinBook, PinEntry
from kamera.store.remote.blobs import BlobCell
from kamera.store.remote.tier import RemoteTier
from lab.reliability.redis_server import RedisServer
from tests.store.builders import CONTEXT, canonical, is_pinned, patch


def bytes_of(store: ChunkStore) -> int:
    return sum(info.bytes for info in store.ls())


def remote_of(store: ChunkStore) -> RemoteTier:
    assert store._tiers.remote is not None
    return store._tiers.remote


# -- pins ------------------------------------------------------------------------------------------


def test_what_one_client_pinned_another_does_not_collect(two: tuple[ChunkStore, ChunkStore]) -> None:
    one, other = two
    kept, gone = (one.put(canonical(c * 64)) for c in "ab")
    loose = one.put(patch("b" * 64))
    StoreAdmin(one).pin([kept])
    assert is_pinned(StoreAdmin(other).pins, kept) and not is_pinned(StoreAdmin(other).pins, gone)
    assert [pin.name for pin in StoreAdmin(other).pins.list()] == [kept]
    done = StoreAdmin(other).gc(0)
    assert {removed.key for removed in done.removed} == {gone, loose}
    assert [info.key for info in other.ls()] == [kept]
    assert (done.objects_before, done.objects_after, done.bytes_after) == (3, 1, bytes_of(other))
    assert StoreAdmin(other).unpin([kept]) == 1 and StoreAdmin(other).unpin([kept]) == 0
    assert [removed.key for removed in StoreAdmin(one).gc(0).removed] == [kept]
    assert other.ls() == [] and one.get_canonical(CONTEXT, "a" * 64) is None


def test_another_leaves_instead_of_what_is_pinned(two: tuple[ChunkStore, ChunkStore]) -> None:
    one, other = two
    for name in "ab":
        one.put(canonical(name * 64))
    size = one.ls()[0].bytes
    [first] = StoreAdmin(other).gc(size, dry_run=True).removed
    StoreAdmin(one).pin([first.key])
    [instead] = StoreAdmin(other).gc(size).removed
    assert instead.key != first.key and [info.key for info in other.ls()] == [first.key]


def test_a_pin_in_a_remote_is_over_after_its_time_for_everybody(server: RedisServer) -> None:
    with ChunkStore.open(server.url("timeout=60")) as store:
        key = store.put(canonical())
        now = [1000.0]
        pins = PinBook(BlobCell(remote_of(store)._blobs), lambda: now[0])
        pins.pin([(key, 10)], ttl=60)
        now[0] += 59.9
        assert pins.list() == [PinEntry(key, 10, 1060.0)] and is_pinned(pins, key)
        now[0] += 0.2
        assert pins.list() == [] and not is_pinned(pins, key) and pins.unpin([key]) == 0
        pins.pin([(key, 10)])
        now[0] += 1e9
        assert pins.list() == [PinEntry(key, 10, None)]


def test_the_cap_binds_every_client(
    two: tuple[ChunkStore, ChunkStore],
) -> None:
    one, other = two
    a, b, c = (one.put(canonical(x * 64)) for x in "abc")
    size = one.ls()[0].bytes
    assert StoreAdmin(one).pins.cap is None
    StoreAdmin(one).pins.set_cap(2 * size)
    assert StoreAdmin(other).pins.cap == 2 * size
    StoreAdmin(other).pin([a], ttl=500)
    before = StoreAdmin(other).pins.list()
    with pytest.raises(PinsFull, match=f"over the cap of {2 * size}"):
        StoreAdmin(one).pin([b, c, a])
    assert StoreAdmin(other).pins.list() == before  # the time of the one that was pinned is as before, too
    StoreAdmin(one).pin([b])
    StoreAdmin(other).pins.set_cap(None)
    StoreAdmin(one).pin([c])
    assert {pin.name for pin in StoreAdmin(other).pins.list()} == {a, b, c}
    for wrong in (lambda: StoreAdmin(one).pin([a], ttl=0), lambda: StoreAdmin(one).pins.set_cap(-1)):
        with pytest.raises(ValueError):
            wrong()


def test_what_is_not_there_cannot_be_pinned(two: tuple[ChunkStore, ChunkStore]) -> None:
    one, _ = two
    key = one.put(canonical())
    for absent in ("0" * 64, "../x"):
        with pytest.raises(UnknownChunk, match=re.escape(absent)):
            StoreAdmin(one).pin([key, absent])
    assert StoreAdmin(one).pins.list() == []


def test_a_pin_that_came_too_late_is_told_and_let_go(
    two: tuple[ChunkStore, ChunkStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    key = one.put(canonical())
    pin = PinBook.pin

    def overtaken(self: PinBook, *arguments: Any) -> None:
        StoreAdmin(other).delete(key)
        pin(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(PinBook, "pin", overtaken)
        with pytest.raises(StoreError, match="lost"):
            StoreAdmin(one).pin([key])
    assert StoreAdmin(one).pins.list() == []


def test_a_pin_during_gc_is_honoured_by_the_next_batch(
    two: tuple[ChunkStore, ChunkStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    one.put(canonical())
    key = one.put(patch())
    names = PinBook.list

    def then_pinned(self: PinBook) -> list[PinEntry]:
        found = names(self)
        monkeypatch.undo()
        StoreAdmin(other).pin([key])
        return found

    monkeypatch.setattr(PinBook, "list", then_pinned)
    assert StoreAdmin(one).gc(0).removed == ()
    assert len(one.ls()) == 2


def test_damaged_pins_are_an_error_and_nothing_is_collected(server: RedisServer) -> None:
    with ChunkStore.open(server.url("timeout=60")) as store:
        key = store.put(canonical())
        StoreAdmin(store).pin([key], ttl=0.001)
        [book] = server.client().keys("*/keep.json")
        for damage in (b"\0", b"x y", b"{}", b'{"format": 1}', b"\xff\xff"):
            server.client().set(book, damage)
            with pytest.raises(StoreError, match=r"pins .*keep\.json.*delete it"):
                StoreAdmin(store).gc(0)
            with pytest.raises(StoreError, match="pins"):
                StoreAdmin(store).pin([key])
        assert [info.key for info in store.ls()] == [key]


def test_clients_that_pin_at_once_lose_nothing(two: tuple[ChunkStore, ChunkStore]) -> None:
    keys = [two[0].put(canonical(f"{i:064x}")) for i in range(6)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: StoreAdmin(two[i % 2]).pin([keys[i]]), range(6)))
    assert [pin.name for pin in StoreAdmin(two[0]).pins.list()] == sorted(keys)


def test_in_memory_pins_are_this_processs_with_cap_and_time() -> None:
    size = canonical().nbytes
    with ChunkStore.open("memory://", memory_limit=6 * size) as store:
        a, b, c = (store.put(canonical(x * 64)) for x in "abc")
        stored = {info.key: info.bytes for info in store.ls()}
        assert StoreAdmin(store).pins.cap == 3 * size
        StoreAdmin(store).pin([a], ttl=500)
        [pin] = StoreAdmin(store).pins.list()
        assert (pin.name, pin.bytes) == (a, stored[a]) and pin.expires is not None
        assert 0 < pin.expires - time.time() <= 500
        StoreAdmin(store).pins.set_cap(size)
        with pytest.raises(PinsFull):
            StoreAdmin(store).pin([b])
        StoreAdmin(store).pins.set_cap(None)
        StoreAdmin(store).pin([b])
        with pytest.raises(UnknownChunk):
            StoreAdmin(store).pin([c, "0" * 64])
        assert [p.name for p in StoreAdmin(store).pins.list()] == sorted([a, b])
        assert StoreAdmin(store).unpin([a, c]) == 1 and not is_pinned(StoreAdmin(store).pins, a)


# -- gc --------------------------------------------------------------------------------------------


def test_gc_reaches_the_budget_and_a_cache_follows(far: str, tmp_path: Path) -> None:
    with ChunkStore.open(far, cache=tmp_path / "cache") as store:
        for name in "abcd":
            store.put(canonical(name * 64))
        store.put(patch("e" * 64))  # its canonical is nowhere
        assert not store.flush(30).unsaved
        size = store.ls("canonical")[0].bytes
        dry = StoreAdmin(store).gc(2 * size, dry_run=True)
        assert len(store.ls()) == 5
        done = StoreAdmin(store).gc(2 * size)
        assert [r.key for r in done.removed] == [r.key for r in dry.removed] and len(done.removed) == 3
        assert (done.bytes_after, len(store.ls())) == (2 * size, 2)
        assert store._disk is not None and len(store._disk.names()) == 2
        for removed in done.removed:
            assert not list((tmp_path / "cache").rglob(f"{removed.key}*"))
        with pytest.raises(StoreError, match="keeps tenants apart"):
            StoreAdmin(store).gc(0, every_tenant=True)


def test_gc_of_a_dead_remote_is_an_error_and_removes_nothing(server: RedisServer) -> None:
    with ChunkStore.open(server.url()) as store:
        store.put(canonical())
        assert not store.flush(30).unsaved
        server.pause()
        with ChunkStore.open(server.url("timeout=0.1&retries=0")) as hasty:  # it asks while nobody answers
            with pytest.raises(RemoteUnavailable):
                StoreAdmin(hasty).gc(0)
            with pytest.raises(RemoteUnavailable):
                StoreAdmin(hasty).pin([canonical().key])
        server.resume()
        assert len(store.ls()) == 1 and StoreAdmin(store).pins.list() == []


# -- quarantine ------------------------------------------------------------------------------------


def objects_of(tmp_path: Path, name: str = "objects") -> list[Path]:
    return [path for path in (tmp_path / "far").rglob("*") if path.parent.name == name]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return f"obstore+{(tmp_path / 'far').as_uri()}"


def test_gc_removes_old_copies_of_a_remote_on_request(folder: str, tmp_path: Path) -> None:
    with ChunkStore.open(folder) as store:
        store.put(canonical())
        [blob] = objects_of(tmp_path)
        blob.write_bytes(b"damaged")
        StoreAdmin(store).verify()
        assert StoreAdmin(store).gc().quarantined == 0
        assert StoreAdmin(store).gc(quarantine_age=3600).quarantined == 0
        time.sleep(0.01)
        assert (
            StoreAdmin(store).gc(quarantine_age=0, dry_run=True).quarantined
            == 1
            == len(StoreAdmin(store).quarantine.copies())
        )
        assert (
            StoreAdmin(store).gc(quarantine_age=0).quarantined == 1
            and StoreAdmin(store).quarantine.copies() == []
        )


def test_tenants_keep_their_pins_apart(far: str) -> None:
    with ChunkStore.open(far, tenant="me") as mine, ChunkStore.open(far, tenant="you") as yours:
        record = canonical(context=replace(CONTEXT, tenant="me"))
        key = mine.put(record)
        StoreAdmin(mine).pin([key])
        assert StoreAdmin(yours).pins.list() == [] and StoreAdmin(yours).unpin([key]) == 0
        with pytest.raises(UnknownChunk):
            StoreAdmin(yours).pin([key])
        assert is_pinned(StoreAdmin(mine).pins, key)
