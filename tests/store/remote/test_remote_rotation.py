"""Keys rotated in a remote while others write: nothing gives way to older bytes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import WrongKey
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.lower import Fetched
from kamera.store.remote.tier import RemoteTier
from lab.reliability.redis_server import RedisServer
from tests.store.builders import CONTEXT, assert_same, canonical, patch

pytest.importorskip("cryptography")

ACME = replace(CONTEXT, tenant="acme")
SECRET, OLD, NEW = b"s" * 32, b"o" * 32, b"n" * 32
CHUNK = "c" * 64


@pytest.fixture(params=["redis", "s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"obstore+{(tmp_path / 'far').as_uri()}"
    name = "server" if request.param == "redis" else "s3"
    return str(request.getfixturevalue(name).url("timeout=60"))


def opened(url: str, *keys: bytes, **options: Any) -> ChunkStore:
    return ChunkStore.open(url, tenant="acme", secret=SECRET, keys=keys, **options)


def test_every_object_of_a_remote_comes_under_the_first_key(url: str) -> None:
    with opened(url, OLD) as store:
        store.put(canonical(context=ACME))
        store.put(patch(context=ACME))
    with opened(url, NEW, OLD) as store:
        store.put(canonical("d" * 64, ACME))
        done = StoreAdmin(store).rotate()
        assert (done.rewritten, done.current, done.refused) == (2, 1, ())
        assert (StoreAdmin(store).rotate().rewritten, StoreAdmin(store).rotate().current) == (0, 3)
    with opened(url, OLD) as store, pytest.raises(WrongKey):
        store.get_canonical(ACME, CHUNK)
    with opened(url, NEW) as store:
        assert_same(store.get_canonical(ACME, CHUNK), canonical(context=ACME))
        assert_same(store.get_patch(ACME, CHUNK, ("x", "y")), patch(context=ACME))


def test_what_is_written_between_the_look_and_the_writing_stays(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = patch(context=ACME, rank=3, seed=7)
    read = RemoteTier.read
    written = []
    with opened(url, OLD) as store:
        store.put(patch(context=ACME, rank=1))

    with opened(url, NEW, OLD) as store, opened(url, NEW, OLD) as writer:

        def overtaken(self: RemoteTier, name: str) -> Fetched | None:
            found = read(self, name)
            if not written:
                written.append(writer.put(newer))
            return found

        with monkeypatch.context() as patched:
            patched.setattr(RemoteTier, "read", overtaken)
            done = StoreAdmin(store).rotate()
        assert (done.rewritten, done.current) == (0, 1)
    with opened(url, NEW) as store:
        assert_same(store.get_patch(ACME, CHUNK, ("x", "y")), newer)


def test_a_concurrent_writer_never_sees_an_older_patch(server: RedisServer) -> None:
    """Each version it wrote is there until it writes the next, whatever the rotations do."""
    url = server.url("timeout=60")
    stop = threading.Event()
    wrong: list[tuple[int, str | None]] = []

    def write() -> None:
        with opened(url, OLD, NEW, memory_limit=0) as store:
            for version in range(40):
                store.put(patch(context=ACME, formed=str(version), seed=version))
                held = store.get_patch(ACME, CHUNK, ("x", "y"))
                if held is None or held.formed != str(version):
                    wrong.append((version, None if held is None else held.formed))
        stop.set()

    writer = threading.Thread(target=write)
    rewritten = 0
    writer.start()
    with opened(url, NEW, OLD) as store:
        while not stop.is_set():
            rewritten += StoreAdmin(store).rotate().rewritten
    writer.join()
    assert wrong == [] and rewritten > 0


def test_a_rotated_cache_sends_nothing_that_the_remote_has_newer(server: RedisServer, tmp_path: Path) -> None:
    url, cache = server.url("timeout=60"), tmp_path / "cache"
    newer = patch(context=ACME, rank=3, seed=7)
    with opened(url, OLD, cache=cache) as store:
        store.put(patch(context=ACME, rank=1))
        assert not store.flush(30).unsaved
    with opened(url, NEW, OLD) as other:
        other.put(newer)
    with opened(url, NEW, OLD, cache=cache) as store:
        assert StoreAdmin(store).rotate().rewritten == 1  # of the two, the cache's
    with opened(url, NEW, cache=cache) as store:
        assert not store.flush(30).unsaved and StoreAdmin(store).stats().remote.stored == 0  # type: ignore[union-attr]
    with opened(url, NEW) as other:
        assert_same(other.get_patch(ACME, CHUNK, ("x", "y")), newer)


def test_an_upload_under_way_is_waited_for(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read under the old key; were it to arrive after the rotation, the new key would not open it."""
    url, cache = server.url("timeout=60&retries=0"), tmp_path / "cache"
    server.kill()
    with opened(url, OLD, cache=cache) as store:
        store.put(canonical(context=ACME))
    server.start()
    put, started, go = RemoteTier.put, threading.Event(), threading.Event()

    def slow(self: RemoteTier, name: str, data: bytes) -> None:
        started.set()
        assert go.wait(300)
        put(self, name, data)

    with monkeypatch.context() as patched:
        patched.setattr(RemoteTier, "put", slow)
        with opened(url, NEW, OLD, cache=cache) as store:
            assert started.wait(300)
            later = threading.Timer(0.3, go.set)
            later.start()
            assert StoreAdmin(store).rotate().refused == ()
            later.join()
    with opened(url, NEW) as store:
        assert_same(store.get_canonical(ACME, CHUNK), canonical(context=ACME))
