"""Memory, a cache directory and a remote as one store: what is where, and what is never lost."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.reliability.redis_server import RedisServer
from kamera.errors import CorruptChunk, RemoteUnavailable
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.remote import RedisBlobs, Uploads
from tests.killing import die, in_child
from tests.store.builders import CONTEXT, assert_same, canonical, patch

QUICK = "timeout=60&retries=0&cooldown=0.05"
CHUNK = "c" * 64
KEY = canonical().key
FILE = f"objects/{KEY}.safetensors"


@pytest.fixture
def opened(server: RedisServer, tmp_path: Path) -> Iterator[Callable[..., ChunkStore]]:
    """Opens a store with a cache in front of the server."""
    with contextlib.ExitStack() as stack:

        def open(cache: str = "cache", **options: object) -> ChunkStore:
            store = ChunkStore.open(server.url(QUICK), cache=tmp_path / cache, **options)  # type: ignore
            return stack.enter_context(store)

        yield open


# -- read through ----------------------------------------------------------------------------------


def test_a_damaged_file_is_healed_from_the_remote(opened: Callable[..., ChunkStore], tmp_path: Path) -> None:
    with opened() as store:
        store.put(canonical())
    path = tmp_path / "cache" / FILE
    path.write_bytes(path.read_bytes()[:-1])
    with opened() as store:
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
        assert len(StoreAdmin(store).quarantined()) == 1
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


# -- write back ------------------------------------------------------------------------------------


def test_a_put_is_on_the_disk_at_once_and_in_the_remote_soon(
    opened: Callable[..., ChunkStore], server: RedisServer, tmp_path: Path
) -> None:
    store = opened()
    server.pause()
    store.put(canonical())
    assert (tmp_path / "cache" / FILE).exists()
    assert store.flush(0.05).unsaved == (KEY,)
    assert StoreAdmin(store).stats().remote.pending == 1  # type: ignore[union-attr]
    server.resume()
    assert not store.flush(30).unsaved
    with ChunkStore.open(server.url(QUICK)) as other:
        assert_same(other.get_canonical(CONTEXT, CHUNK), canonical())


def test_acknowledged_puts_of_a_killed_process_are_uploaded(server: RedisServer, tmp_path: Path) -> None:
    url, cache = server.url(QUICK), tmp_path / "cache"
    server.kill()

    def puts_and_dies(tell: Callable[[bytes], None]) -> None:
        store = ChunkStore.open(url, cache=cache)
        for name in "abc":
            tell(store.put(canonical(name)).encode())
        die()

    ended = in_child(puts_and_dies)
    assert ended.killed and len(ended.told) == 3 * len(KEY)
    server.start()
    with ChunkStore.open(url, cache=cache) as store:
        assert not store.flush(30).unsaved
        assert StoreAdmin(store).stats().remote.stored == 3  # type: ignore[union-attr]
    with ChunkStore.open(url) as other:
        for name in "abc":
            assert_same(other.get_canonical(CONTEXT, name), canonical(name))
    with ChunkStore.open(url, cache=cache) as store:
        assert store.flush(0).unsaved == ()
        assert StoreAdmin(store).stats().remote.stored == 0  # type: ignore[union-attr]


def test_what_is_fetched_never_covers_what_was_put_meanwhile(
    opened: Callable[..., ChunkStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened("one") as store:
        store.put(patch(seed=1))
    get = RedisBlobs.get
    store = opened("two")
    fetched, put = threading.Event(), threading.Event()

    def held(self: RedisBlobs, name: str) -> bytes | None:
        data = get(self, name)
        fetched.set()
        assert put.wait(60)  # nothing waits for the fetch: the put is as of another process
        return data

    monkeypatch.setattr(RedisBlobs, "get", held)
    reader = threading.Thread(target=store.get_patch, args=(CONTEXT, CHUNK, ("x", "y")))
    reader.start()
    assert fetched.wait(60)
    with ChunkStore.open(tmp_path / "two") as other:
        other.put(patch(seed=2))
    put.set()
    reader.join()
    assert_same(store.get_patch(CONTEXT, CHUNK, ("x", "y")), patch(seed=2))


def test_what_is_deleted_while_it_waits_does_not_come_back(
    opened: Callable[..., ChunkStore], server: RedisServer
) -> None:
    store = opened()
    server.client().config_set("maxmemory-policy", "noeviction")
    server.client().config_set("maxmemory", "1mb")
    store.put(canonical())
    assert store.flush(0.2).unsaved == (KEY,)
    server.client().config_set("maxmemory", "0")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:  # until writes are tried again
        with contextlib.suppress(RemoteUnavailable):
            assert StoreAdmin(store).delete(KEY)
            break
        time.sleep(0.02)
    assert store.flush(30).unsaved == ()
    assert store.get_canonical(CONTEXT, CHUNK) is None
    with ChunkStore.open(server.url(QUICK)) as other:
        assert other.get_canonical(CONTEXT, CHUNK) is None


# -- the cache's limit -----------------------------------------------------------------------------


def size_of(store: ChunkStore) -> int:
    return max(info.bytes for info in store.ls())


def test_a_cache_over_its_limit_evicts_the_least_recently_used(
    opened: Callable[..., ChunkStore], tmp_path: Path
) -> None:
    with opened() as store:
        for name in "abcde":
            store.put(canonical(name))
            time.sleep(0.002)  # times are kept to the millisecond
        assert not store.flush(30).unsaved
        one = size_of(store)
    with opened() as store:
        for name in "ca":
            assert store.get_canonical(CONTEXT, name) is not None
    with opened(disk_limit=int(3.5 * one)) as store:
        here = {info.chunk_id for info in store.ls(here=True)}
        assert here == {"a", "c", "e"}
        assert len(store.ls()) == 5
        for name in "abcde":
            assert_same(store.get_canonical(CONTEXT, name), canonical(name))
        files = list((tmp_path / "cache").glob("objects/*.safetensors"))
        assert len(files) <= 3


def test_what_the_remote_does_not_have_never_leaves_the_cache(
    opened: Callable[..., ChunkStore], server: RedisServer
) -> None:
    with opened(disk_limit=1) as store:
        server.kill()
        for name in "abc":
            store.put(canonical(name))
        assert [store.get_canonical(CONTEXT, name) is not None for name in "abc"] == [True] * 3
        server.start()
        assert not store.flush(30).unsaved
        store.put(canonical("d"))
        assert not store.flush(30).unsaved
        assert len(store.ls(here=True)) <= 1
        assert [store.get_canonical(CONTEXT, name) is not None for name in "abcd"] == [True] * 4


# -- locks and uploads by themselves ---------------------------------------------------------------


def test_one_object_that_is_refused_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    sent = []

    def send(name: str) -> None:
        if name == "bad":
            raise RemoteUnavailable("too large")
        if name == "odd":
            raise KeyError("unforeseen")
        if name == "damaged":
            raise CorruptChunk("moved to quarantine")
        sent.append(name)

    uploads = Uploads(send)
    with caplog.at_level(logging.ERROR):
        for name in ("bad", "odd", "damaged", "a", "b"):
            uploads.add(name)
        deadline = time.monotonic() + 60
        while set(uploads.names()) != {"bad", "odd"} and time.monotonic() < deadline:
            uploads.flush(0.05)
    assert sent == ["a", "b"]
    assert set(uploads.names()) == {"bad", "odd"}
    assert "unforeseen" in caplog.text
    uploads.close()
