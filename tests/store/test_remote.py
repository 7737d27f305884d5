"""A store whose objects are in Redis or an object store: what it serves, and what it refuses to."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reliability import remotes as outages
from benchmarks.reliability import rig
from benchmarks.reliability.redis_server import BINARY, MISSING, RedisServer
from kamera.errors import CorruptChunk, RemoteUnavailable, StoreError, UnknownChunk
from kamera.store import ChunkStore, Context, StoreAdmin
from kamera.store.format import Codec
from kamera.store.remote import OBJECTS, Breaker, Uploads
from tests.servers.s3_server import S3Server
from tests.store.builders import CONTEXT, assert_same, canonical, is_pinned, patch

CHUNK = "c" * 64
KEY = canonical().key


@pytest.fixture(params=["redis", "valkey", "mooncake", "s3", "obstore"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param != "obstore":
        name = "server" if request.param == "redis" else request.param
        return request.getfixturevalue(name).url("timeout=60")
    return f"obstore+{(tmp_path / 'objects').as_uri()}"


def test_what_one_machine_put_another_gets(url: str) -> None:
    with ChunkStore.open(url) as one:
        assert one.put(canonical()) == KEY
        one.put(patch())
        one.put(patch(kind="orbit", rank=1))
        assert one.flush(0) == one.flush(0) and not one.flush(0).unsaved
    with ChunkStore.open(url) as two:
        assert two.has(CONTEXT, CHUNK) and two.has(CONTEXT, CHUNK, ("x", "y"))
        assert_same(two.get_canonical(CONTEXT, CHUNK), canonical())
        assert_same(two.get_patch(CONTEXT, CHUNK, ("x", "y")), patch())
        assert_same(two.get_patch(CONTEXT, CHUNK, ("x", "y"), "orbit"), patch(kind="orbit", rank=1))
        assert two.get_canonical(replace(CONTEXT, anchor="b"), CHUNK) is None
        stats = StoreAdmin(two).stats().remote
        assert stats is not None and (stats.hits, stats.misses, stats.refused) == (3, 1, 0)


# -- a remote that lies ----------------------------------------------------------------------------


LIES = {
    "flipped bit in a tensor": lambda data: data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
    "flipped bit in the header": lambda data: data[:150] + bytes([data[150] ^ 1]) + data[151:],
    "truncated": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "something behind it": lambda data: data + b"\0",
    "nothing": lambda data: b"\0",
    "another object": lambda data: Codec().encode(canonical("d" * 64), 1.0),
    "another context's": lambda data: Codec().encode(canonical(context=Context("g", "h")), 1.0),
    "a patch": lambda data: Codec().encode(patch(), 1.0),
}


@pytest.mark.parametrize("lie", LIES)
def test_damage_is_refused_by_name_set_aside_and_then_a_miss(lie: str, url: str) -> None:
    with ChunkStore.open(url) as store:
        blobs, name = store._remote.blobs, OBJECTS + store.put(canonical())  # type: ignore[union-attr]
        blobs.put(name, LIES[lie](blobs.get(name) or b""))
    with ChunkStore.open(url) as store:
        with pytest.raises(CorruptChunk, match=r"quarantine/"):
            store.get_canonical(CONTEXT, CHUNK)
        assert store.get_canonical(CONTEXT, CHUNK) is None
        assert len(StoreAdmin(store).quarantined()) == 1
        store.put(canonical())
    with ChunkStore.open(url) as store:
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


# -- a remote that does not work -------------------------------------------------------------------


def test_nobody_there_makes_misses_and_the_first_one_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"redis+unix://{tmp_path}/no?retries=0&cooldown=600"
    with caplog.at_level(logging.WARNING), ChunkStore.open(url) as store:
        for _ in range(10):
            assert store.get_canonical(CONTEXT, CHUNK) is None
            assert not store.has(CONTEXT, CHUNK)
            assert store.info(CONTEXT, CHUNK, ("x",)) is None
            assert store.ls() == [] and store.contexts_of(CHUNK) == []
        stats = StoreAdmin(store).stats().remote
        assert stats is not None and stats.reads == "open" and stats.failures == 2 and stats.skipped > 30
        assert "Error" in stats.last_error
        assert len(caplog.records) == 1 and "miss" in caplog.text


def test_pending_objects_stay_and_dropped_ones_are_reported(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    url, size = server.url("timeout=60&retries=0&cooldown=0.05"), canonical("a").nbytes
    with ChunkStore.open(url, memory_limit=2 * size) as store:
        server.kill()
        for chunk in "abc":
            store.put(canonical(chunk))
        report = store.flush(0)
        assert set(report.unsaved) == {canonical("a").key, canonical("b").key}  # retries change the order
        assert report.dropped == (canonical("c").key,) and canonical("c").key in caplog.text
        assert store.get_canonical(CONTEXT, "a") is not None
        assert store.get_canonical(CONTEXT, "b") is not None
        server.start()
        assert not store.flush(30).unsaved
        store.put(canonical("c"))
        assert store.flush(30).dropped == ()
    with ChunkStore.open(url) as store:
        assert [store.has(CONTEXT, chunk) for chunk in "abc"] == [True] * 3


def test_closing_waits_for_no_dead_remote_and_says_what_is_lost(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with ChunkStore.open(server.url()) as store:
        server.kill()
        store.put(canonical())
    assert "1 objects that never reached the remote" in caplog.text


# -- urls ------------------------------------------------------------------------------------------


def test_passwords_are_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    with ChunkStore.open("redis://user:hunter2@127.0.0.1:1/3?retries=0&timeout=0.2") as store:
        assert store.get_canonical(CONTEXT, CHUNK) is None
        assert store.url == "redis://127.0.0.1:1/3"
        assert "hunter2" not in f"{store!r} {StoreAdmin(store).stats()} {caplog.text}"


def test_an_object_store_that_is_off_misses_and_puts_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s3 = S3Server()
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    s3.reset()
    with ChunkStore.open(s3.url()) as store:
        for chunk in "ab":
            store.put(canonical(chunk))
    with ChunkStore.open(s3.url("timeout=60&retries=0&cooldown=600")) as store:
        assert store.get_canonical(CONTEXT, "a") is not None
        s3.stop()
        assert [store.get_canonical(CONTEXT, c) is not None for c in "abab"] == [True, False, True, False]
        store.put(canonical("c"))
        assert store.flush(0.05).unsaved == (canonical("c").key,)
        with pytest.raises(RemoteUnavailable):
            StoreAdmin(store).reach()
        stats = StoreAdmin(store).stats().remote
        assert stats is not None and stats.reads == "open" and stats.failures >= 3


# -- the breaker -----------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_breaker_opens_after_failures_and_retries_once() -> None:
    clock = Clock()
    one = Breaker("reads", 10.0, clock)
    for outcome in (one.report_failure, one.report_success, one.report_failure):  # never two in a row
        assert one.allow()
        outcome()
    assert one.state == "closed" and one.allow()
    one.report_failure()
    assert one.state == "open" and not one.allow()
    clock.now = 9.9
    assert not one.allow()
    clock.now = 10.0
    assert one.state == "half-open"
    assert one.allow() and not one.allow()
    one.report_failure()
    assert one.state == "open" and not one.allow()
    clock.now = 20.0
    assert one.allow()
    one.report_success()
    assert one.state == "closed" and one.allow() and one.allow()


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
    assert (done.objects_before, done.objects_after, done.bytes_after) == (
        3,
        1,
        sum(i.bytes for i in other.ls()),
    )
    assert StoreAdmin(other).unpin([kept]) == 1 and StoreAdmin(other).unpin([kept]) == 0
    assert [removed.key for removed in StoreAdmin(one).gc(0).removed] == [kept]
    assert other.ls() == [] and one.get_canonical(CONTEXT, "a" * 64) is None


def test_pins_at_once_do_not_undo_each_other_and_those_that_are_over_are_removed(
    two: tuple[ChunkStore, ChunkStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    a, b, c = (one.put(canonical(chunk * 64)) for chunk in "abc")
    StoreAdmin(one).pin([a], ttl=0.01)
    put = one._remote.put_blob  # type: ignore[union-attr]

    def slow(blob: str, data: bytes) -> None:  # another client comes in between
        monkeypatch.undo()
        StoreAdmin(other).pin([c])
        StoreAdmin(other).pins.set_cap("1GiB")
        put(blob, data)

    time.sleep(0.02)
    monkeypatch.setattr(one._remote, "put_blob", slow)
    StoreAdmin(one).pin([b])
    for store in two:
        pins = StoreAdmin(store).pins
        assert ({pin.name for pin in pins.list()}, pins.cap) == ({b, c}, 2**30)
    assert sorted(one._remote.names_in("pins/")) == sorted(f"pins/{n}" for n in (b, c, "cap"))  # type: ignore[union-attr]


def test_damaged_pins_are_an_error_and_nothing_is_collected(server: RedisServer) -> None:
    with ChunkStore.open(server.url("timeout=60")) as store:
        key = store.put(canonical())
        StoreAdmin(store).pin([key], ttl=0.001)
        [book] = server.client().keys("*/pins/*")
        for damage in (b"\0", b"x y", b"{}", b'{"format": 1}', b"\xff\xff"):
            server.client().set(book, damage)
            with pytest.raises(StoreError, match=r"pins .*pins/.*delete it"):
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
        assert len(list((tmp_path / "cache").glob("objects/*"))) == 2
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


def test_tenants_keep_their_pins_apart(far: str) -> None:
    with ChunkStore.open(far, tenant="me") as mine, ChunkStore.open(far, tenant="you") as yours:
        record = canonical(context=replace(CONTEXT, tenant="me"))
        key = mine.put(record)
        StoreAdmin(mine).pin([key])
        assert StoreAdmin(yours).pins.list() == [] and StoreAdmin(yours).unpin([key]) == 0
        with pytest.raises(UnknownChunk):
            StoreAdmin(yours).pin([key])
        assert is_pinned(StoreAdmin(mine).pins, key)


# -- outages ---------------------------------------------------------------------------------------

needs_redis = pytest.mark.skipif(BINARY is None, reason=MISSING)


@needs_redis
def test_outages_serve_nothing_wrong_and_lose_no_acknowledged() -> None:
    found = outages.run(480, seed=1)
    assert (found["wrong"], found["lost"]) == (0, 0)
    cases = found["cases"]
    assert len(cases) == 8
    for name, figures in cases.items():
        assert figures["troubles"] and figures["puts"] and figures["answered"], name
    assert cases["lying"]["refused"] and cases["files that lie"]["refused"]


@needs_redis
def test_a_wrong_version_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig, "version_of", lambda found: 10**6)
    assert outages.run(60, seed=1)["wrong"]


@needs_redis
def test_a_lost_object_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "_TROUBLE", 0.5)
    monkeypatch.setattr(Uploads, "add", lambda self, name: None)
    assert outages.run(120, seed=1)["lost"]
