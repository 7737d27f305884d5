"""What every driver does alike, on real services: Redis, Mooncake, an S3 server, a directory, memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.reliability.redis_server import RedisServer
from kamera.store.remote import Blobs, MooncakeBlobs, ObjectBlobs, RedisBlobs
from tests.servers.s3_server import BUCKET

Opener = Callable[[str], Blobs]


@pytest.fixture(params=["redis", "valkey", "mooncake", "s3", "file", "memory"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    """Opens the blobs under a prefix, of one service."""
    if request.param in ("redis", "valkey"):
        name = "server" if request.param == "redis" else "valkey"
        server: RedisServer = request.getfixturevalue(name)
        return lambda prefix: RedisBlobs(
            f"unix://{server.socket}", prefix, timeout=60, retries=1, shown_url="r://"
        )
    if request.param == "mooncake":
        url = request.getfixturevalue("mooncake").url("")
        return lambda prefix: MooncakeBlobs(url, prefix, timeout=60, retries=1, shown_url="mooncake://")
    if request.param == "s3":
        request.getfixturevalue("s3")
        return lambda prefix: ObjectBlobs(
            f"s3://{BUCKET}", f"folder/{prefix}", timeout=60, retries=1, shown_url="s3://"
        )
    if request.param == "file":
        return lambda prefix: ObjectBlobs(
            (tmp_path / "a b").as_uri(), prefix, timeout=60, retries=1, shown_url="f://"
        )
    return lambda prefix: ObjectBlobs("memory://", prefix, timeout=60, retries=1, shown_url="m://")


@pytest.fixture
def blobs(opener: Opener) -> Iterator[Blobs]:
    opened = opener("some/prefix/")
    yield opened
    opened.close()


@pytest.mark.few(3)
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


@pytest.mark.few(4)
def test_the_front_of_many_blobs_in_one_call(blobs: Blobs) -> None:
    count = 270 if blobs.url == "r://" else 30  # more than Redis is asked for in one round trip
    names = [f"objects/{i:03d}" for i in range(count)]
    for i, name in enumerate(names):
        blobs.put(name, bytes([i % 256]) * (i + 1))
    heads = blobs.read_heads([*names, "objects/none"], 10)
    assert heads[-1] is None
    for i, head in enumerate(heads[:-1]):
        assert head == (bytes([i % 256]) * min(i + 1, 10), i + 1)
    assert blobs.read_heads([], 10) == []


def test_names_are_those_under_the_prefix_and_no_others(opener: Opener) -> None:
    first, second = opener("k/v1/a*/"), opener("k/v1/ab/")
    first.put("objects/x", b"1")
    first.put("quarantine/x.1", b"2")
    second.put("objects/y", b"3")
    assert sorted(first.marks("")) == ["objects/x", "quarantine/x.1"]
    assert list(first.marks("quarantine/")) == ["quarantine/x.1"]
    assert list(second.marks("objects/")) == ["objects/y"] and not second.marks("pins/")
    assert first.get("objects/y") is None
    first.close()
    second.close()


def test_many_are_removed_at_once_those_that_are_there(blobs: Blobs) -> None:
    for i in range(30):
        blobs.put(f"objects/{i}", b"1")
    blobs.delete([f"objects/{i}" for i in range(10, 40)])
    assert sorted(blobs.marks("")) == sorted(f"objects/{i}" for i in range(10))
    assert blobs.get("objects/10") is None
    blobs.delete([])
    assert len(blobs.marks("")) == 10


def test_a_mark_changes_with_its_blob_and_only_then(blobs: Blobs) -> None:
    blobs.put("objects/a", b"1")
    blobs.put("objects/b", b"1")
    before = blobs.marks("objects/")
    assert blobs.marks("objects/") == before
    blobs.put("objects/a", b"2")
    after = blobs.marks("objects/")
    assert after["objects/b"] == before["objects/b"]
    # a service without marks says so, and is asked for the front instead
    assert after["objects/a"] is None or after["objects/a"] != before["objects/a"]
