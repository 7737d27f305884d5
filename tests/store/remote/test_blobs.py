"""What every driver does alike, on real services: Redis, Mooncake, an S3 server, a directory, memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import obstore
import obstore.store
import pytest

from kamera.store.remote.blobs import BlobHead, Blobs
from kamera.store.remote.objects import ObjectBlobs
from kamera.store.remote.redis import RedisBlobs
from tests.servers.redis_server import RedisServer
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
        from kamera.store.remote.mooncake import MooncakeBlobs

        return lambda prefix: MooncakeBlobs(url, prefix, timeout=60, retries=1, shown_url="mooncake://")
    if request.param == "s3":
        request.getfixturevalue("s3")
        return lambda prefix: ObjectBlobs.open(
            f"s3://{BUCKET}", f"folder/{prefix}", timeout=60, retries=1, shown_url="s3://"
        )
    if request.param == "file":
        return lambda prefix: ObjectBlobs.open(
            (tmp_path / "a b").as_uri(), prefix, timeout=60, retries=1, shown_url="f://"
        )
    memory = obstore.store.MemoryStore()
    return lambda prefix: ObjectBlobs(memory, prefix, shown_url="m://")


def exchanging(blobs: Blobs) -> Blobs:
    if blobs.url == "mooncake://":
        pytest.skip("it exchanges nothing: test_mooncake.py")
    return blobs


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
    count = 270 if blobs.url == "r://" else 30  # more than Redis is asked for in one round trip
    names = [f"objects/{i:03d}" for i in range(count)]
    for i, name in enumerate(names):
        blobs.put(name, bytes([i % 256]) * (i + 1))
    heads = blobs.read_heads([*names, "objects/none"], 10)
    assert heads[-1] is None
    for i, head in enumerate(heads[:-1]):
        assert head == BlobHead(bytes([i % 256]) * min(i + 1, 10), i + 1)
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


def test_what_is_put_in_the_place_of_nothing_never_replaces(blobs: Blobs) -> None:
    assert blobs.replace("objects/a", b"first", None)
    assert not blobs.replace("objects/a", b"second", None)
    assert blobs.get("objects/a") == b"first" and list(blobs.marks("")) == ["objects/a"]


def test_a_blob_gives_way_only_as_the_one_that_was_read(blobs: Blobs) -> None:
    exchanging(blobs).put("objects/a", b"old")
    assert blobs.replace("objects/a", b"new", b"old")
    assert not blobs.replace("objects/a", b"newer", b"old")
    assert not blobs.replace("objects/none", b"new", b"old")
    assert blobs.get("objects/a") == b"new" and list(blobs.marks("")) == ["objects/a"]
    assert not blobs.replace("objects/a", None, b"old")
    assert blobs.replace("objects/a", None, b"new") and not blobs.marks("")
    assert not blobs.replace("objects/a", None, b"new")


def test_exchanges_at_once_lose_nothing(blobs: Blobs) -> None:
    exchanging(blobs).put("objects/a", b"0")

    def count(times: int) -> None:
        while times:
            held = blobs.get("objects/a") or b""
            times -= blobs.replace("objects/a", str(int(held) + 1).encode(), held)

    counters = [threading.Thread(target=count, args=(8,)) for _ in range(3)]
    for counter in counters:
        counter.start()
    for counter in counters:
        counter.join()
    assert blobs.get("objects/a") == b"24"


def test_what_is_deleted_while_it_is_replaced_does_not_come_back(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not blobs.url.startswith("f://"):
        pytest.skip("the service refuses it")
    blobs.put("objects/a", b"old")
    get, deletes = obstore.get, threading.Thread(target=lambda: blobs.delete(["objects/a"]))

    def overtaken(*arguments: Any, **named: Any) -> Any:
        found = get(*arguments, **named)
        deletes.start()
        deletes.join(0.2)  # it waits for the one that replaces
        return found

    monkeypatch.setattr(obstore, "get", overtaken)
    blobs.replace("objects/a", b"new", b"old")
    deletes.join()
    assert not blobs.marks("")
