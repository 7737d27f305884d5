"""Upkeep of a remote: pins that every client honours, gc, listings that read little, quarantine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kamera.errors import RemoteUnavailable, StoreError, UnknownChunk
from kamera.store import ChunkStore, StoreAdmin
from tests.servers.redis_server import RedisServer
from tests.store.builders import CONTEXT, canonical, is_pinned, patch


def bytes_of(store: ChunkStore) -> int:
    return sum(info.bytes for info in store.ls())


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


# -- gc --------------------------------------------------------------------------------------------


def test_gc_reaches_the_budget_and_a_cache_follows(far: str, tmp_path: Path) -> None:
    with ChunkStore.open(far, cache=tmp_path / "cache") as store:
        for name in "abcd":
            store.put(canonical(name * 64))
        store.put(patch("e" * 64))  # its canonical is nowhere
        assert not store.flush(30).unsaved
        budget = 2 * max(info.bytes for info in store.ls("canonical"))  # times of a few digits more or less
        dry = StoreAdmin(store).gc(budget, dry_run=True)
        assert len(store.ls()) == 5
        done = StoreAdmin(store).gc(budget)
        assert [r.key for r in done.removed] == [r.key for r in dry.removed] and len(done.removed) == 3
        assert done.bytes_after <= budget and len(store.ls()) == 2
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


def test_tenants_keep_their_pins_apart(far: str) -> None:
    with ChunkStore.open(far, tenant="me") as mine, ChunkStore.open(far, tenant="you") as yours:
        record = canonical(context=replace(CONTEXT, tenant="me"))
        key = mine.put(record)
        StoreAdmin(mine).pin([key])
        assert StoreAdmin(yours).pins.list() == [] and StoreAdmin(yours).unpin([key]) == 0
        with pytest.raises(UnknownChunk):
            StoreAdmin(yours).pin([key])
        assert is_pinned(StoreAdmin(mine).pins, key)
