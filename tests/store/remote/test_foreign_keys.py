"""What others put into a remote under our prefix: named, passed over, and never an outage."""

from __future__ import annotations

from typing import Any

import pytest

from kamera.errors import ForeignKey, StoreError
from kamera.store import ChunkStore, StoreAdmin
from lab.reliability.redis_server import RedisServer
from lab.reliability.s3_server import BUCKET, S3Server
from tests.store.builders import CHUNK, CONTEXT, assert_same, canonical, patch

OTHER = "d" * 64
SPARE = "5" * 64  # an object's name that nothing else has


def filled(store: ChunkStore) -> set[str]:
    return {
        store.put(canonical()),
        store.put(canonical(OTHER)),
        store.put(patch()),
    }


def state(store: ChunkStore) -> tuple[str, str, int]:
    remote = StoreAdmin(store).stats().remote
    assert remote is not None
    return remote.reads, remote.writes, remote.failures


def assert_at_work(url: str, keys: set[str]) -> None:
    """A machine that comes to the remote afterwards: everything is served, listed and kept up."""
    with ChunkStore.open(url, memory_limit=0) as store:
        for _ in range(4):  # more often than a breaker waits for
            assert {info.key for info in store.ls()} == keys
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
        StoreAdmin(store).pin(sorted(keys)[:1])
        assert [pin.name for pin in StoreAdmin(store).pins.list()] == sorted(keys)[:1]
        assert StoreAdmin(store).gc("1GiB").objects_after == len(keys)
        assert StoreAdmin(store).quarantine.copies() == []
        done = StoreAdmin(store).forget(OTHER)
        assert len(done.removed) == 1
        assert {info.key for info in store.ls()} == keys - set(done.removed)
        assert state(store) == ("closed", "closed", 0)


KINDS: dict[str, tuple[Any, ...]] = {
    "list": ("RPUSH", "x"),
    "hash": ("HSET", "a", "b"),
    "set": ("SADD", "x"),
    "stream": ("XADD", "*", "a", "b"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_redis_key_of_another_type_takes_nobody_down(server: RedisServer, kind: str) -> None:
    url = server.url("timeout=60")
    with ChunkStore.open(url) as store:
        keys = filled(store)
    command, *values = KINDS[kind]
    [prefix] = {name.decode().rpartition("objects/")[0] for name in server.client().keys("*objects/*")}
    places = [f"objects/{SPARE}", "objects/notes", f"quarantine/{SPARE}.17", "keep.json"]
    for place in places:
        server.client().execute_command(command, prefix + place, *values)
    with ChunkStore.open(url) as store:
        for asks in (StoreAdmin(store).pins.list, lambda: StoreAdmin(store).gc(0)):
            with pytest.raises(ForeignKey, match=r"keep\.json"):
                asks()
        server.client().delete(prefix + places.pop())
        report = StoreAdmin(store).verify()
        assert report.ok == len(keys) and report.quarantined == ()
        assert len(report.refused) == 2
        for name in (SPARE, "objects/notes"):
            assert any(name in line for line in report.refused), name
        left = StoreAdmin(store).forget("f" * 64).left
        assert any(SPARE in line for line in left)
        assert state(store) == ("closed", "closed", 0)
    for place in places[2:]:
        server.client().delete(prefix + place)
    assert_at_work(url, keys)


def test_a_key_of_another_type_is_overwritten(server: RedisServer) -> None:
    url = server.url("timeout=60")
    with ChunkStore.open(url, memory_limit=0) as store:
        key = store.put(canonical())
        [name] = server.client().keys(f"*objects/{key}")
        server.client().delete(name)
        server.client().rpush(name, "x")
        for _ in range(4):
            with pytest.raises(ForeignKey, match="another type"):
                store.get_canonical(CONTEXT, CHUNK)
        assert store.info(CONTEXT, CHUNK) is None
        assert state(store) == ("closed", "closed", 0)
        store.put(canonical())
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


def test_names_and_sizes_of_others_in_redis_are_passed_over(server: RedisServer) -> None:
    url = server.url("timeout=60")
    with ChunkStore.open(url) as store:
        keys = filled(store)
    [prefix] = {name.decode().rpartition("objects/")[0] for name in server.client().keys("*objects/*")}
    for name in (
        b"objects/\xff\xfe",
        b"objects/",
        b"objects/../x",
        b"objects/a b\n",
        b"objects/" + b"n" * 5000,
    ):
        server.client().set(prefix.encode() + name, b"x")
    server.client().set(f"{prefix}objects/notes", bytes(20 * 2**20))
    with ChunkStore.open(url) as store:
        report = StoreAdmin(store).verify()
        assert report.ok == len(keys) and len(report.refused) == 6
    assert_at_work(url, keys)


def client(s3: S3Server) -> Any:
    boto3 = pytest.importorskip("boto3")
    named = s3.environment
    return boto3.client(
        "s3",
        endpoint_url=s3.endpoint,
        region_name="us-east-1",
        aws_access_key_id=named["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=named["AWS_SECRET_ACCESS_KEY"],
    )


def planted(s3: S3Server, *names: str) -> str:
    """Put foreign keys beside the objects; where these lie."""
    there = client(s3)
    [first, *_] = there.list_objects_v2(Bucket=BUCKET)["Contents"]
    prefix = first["Key"].rpartition("objects/")[0]
    for name in names:
        there.put_object(Bucket=BUCKET, Key=f"{prefix}{name}", Body=b"x")
    return str(prefix)


@pytest.mark.parametrize(
    "name", ["objects/../x", "objects//x", "objects/5a/../x", "objects/5a//x", "objects/5a/./y", "objects/zz"]
)
def test_an_s3_key_that_is_no_path_takes_nobody_down(s3: S3Server, name: str) -> None:
    url = s3.url()
    with ChunkStore.open(url) as store:
        keys = filled(store)
    planted(s3, name)
    with ChunkStore.open(url) as store:
        report = StoreAdmin(store).verify()
        assert report.ok == len(keys) and report.quarantined == ()
        named = name.removeprefix("objects/").partition("/")[0]
        assert any(named in line for line in report.refused)
        assert state(store) == ("closed", "closed", 0)
    assert_at_work(url, keys)


def test_s3_keys_that_stop_a_listing_are_named(s3: S3Server) -> None:
    url = s3.url()
    with ChunkStore.open(url, memory_limit=0) as store:
        filled(store)
        planted(s3, "objects/../x", "objects/5a/../x")
        for _ in range(4):
            with pytest.raises(StoreError, match=r"objects/5a/\.\./x"):
                store.ls()
            assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
        assert state(store) == ("closed", "closed", 0)
        store.put(patch(OTHER))


def test_an_object_of_somebody_elses_bytes_is_set_aside(s3: S3Server) -> None:
    with ChunkStore.open(s3.url(), memory_limit=0) as store:
        keys = filled(store)
        planted(s3, f"objects/{SPARE}")
        assert {info.key for info in store.ls()} == keys
        [line] = StoreAdmin(store).verify().quarantined
        assert SPARE in line
