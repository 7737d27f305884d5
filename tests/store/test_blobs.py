"""What every driver does alike, on real services: redis-server, a directory and memory behind obstore."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore.store
import pytest

from benchmarks.redis_server import RedisServer
from kamera.store.remote.blobs import Blobs, Head
from kamera.store.remote.objects import ObjectBlobs
from kamera.store.remote.redis import RedisBlobs

Opener = Callable[[str], Blobs]


@pytest.fixture(params=["redis", "file", "memory"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens the blobs under a prefix, of one service."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("server")
        return lambda prefix: RedisBlobs(
            f"unix://{server.socket}", prefix, timeout=5, retries=1, shown="r://"
        )
    if request.param == "file":
        return lambda prefix: ObjectBlobs.open(
            (tmp_path / "a b").as_uri(), prefix, timeout=5, retries=1, shown="f://"
        )
    memory = obstore.store.MemoryStore()
    return lambda prefix: ObjectBlobs(memory, prefix, shown="m://")


@pytest.fixture
def blobs(opener: Opener) -> Iterator[Blobs]:
    opened = opener("some/prefix/")
    yield opened
    opened.close()


def test_what_was_put_comes_back_byte_for_byte(blobs: Blobs) -> None:
    every = bytes(range(256)) * 5
    large = os.urandom(6 * 2**20)  # several parts for an object store
    blobs.put("objects/a", every)
    blobs.put("objects/b", large)
    assert blobs.get("objects/a") == every
    assert blobs.get("objects/b") == large
    blobs.put("objects/a", b"new")
    assert blobs.get("objects/a") == b"new"
    assert blobs.get("objects/c") is None


def test_the_front_of_many_blobs_in_one_call(blobs: Blobs) -> None:
    names = [f"objects/{i:03d}" for i in range(300)]
    for i, name in enumerate(names):
        blobs.put(name, bytes([i % 256]) * (i + 1))
    heads = blobs.heads([*names, "objects/none"], 10)
    assert heads[-1] is None
    for i, head in enumerate(heads[:-1]):
        assert head == Head(bytes([i % 256]) * min(i + 1, 10), i + 1)
    assert blobs.heads([], 10) == []


def test_names_are_those_under_the_prefix_and_no_others(opener: Opener) -> None:
    first, second = opener("k/v1/a*/"), opener("k/v1/ab/")
    first.put("objects/x", b"1")
    first.put("quarantine/x.1", b"2")
    second.put("objects/y", b"3")
    assert sorted(first.names()) == ["objects/x", "quarantine/x.1"]
    assert second.names() == ["objects/y"]
    assert first.get("objects/y") is None
    first.close()
    second.close()


def test_deleting_tells_whether_there_was_something(blobs: Blobs) -> None:
    blobs.put("objects/a", b"1")
    assert blobs.delete("objects/a")
    assert not blobs.delete("objects/a")
    assert blobs.get("objects/a") is None and blobs.names() == []


def test_only_the_very_blob_is_set_aside(blobs: Blobs) -> None:
    blobs.put("objects/a", b"bad")
    assert not blobs.set_aside("objects/a", b"other", "quarantine/a.1")
    assert blobs.get("objects/a") == b"bad"
    assert blobs.set_aside("objects/a", b"bad", "quarantine/a.1")
    assert blobs.names() == ["quarantine/a.1"]
    assert blobs.get("quarantine/a.1") == b"bad"
    assert not blobs.set_aside("objects/a", b"bad", "quarantine/a.2")


def test_a_value_that_redis_cannot_hold_is_refused_before_it_is_sent(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kamera.store.remote.redis.MAX_BYTES", 3)
    blobs = RedisBlobs(f"unix://{server.socket}", "p/", timeout=5, retries=0, shown="r://")
    with pytest.raises(ValueError, match="4 bytes are more than the 3"):
        blobs.put("objects/a", b"1234")
    assert issubclass(ValueError, blobs.errors)
    blobs.close()
