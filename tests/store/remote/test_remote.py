"""A store whose objects are in Redis or an object store: what it serves, and what it refuses to."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kamera.errors import CorruptChunk, ForeignKey, RemoteUnavailable, StoreError, StoreVersionError
from kamera.store import ChunkStore, Context, StoreAdmin
from kamera.store.codec import Codec
from kamera.store.sources import BytesSource
from lab.reliability.redis_server import RedisServer
from tests.store.builders import CONTEXT, assert_same, canonical, join, patch, split

CHUNK = "c" * 64
KEY = canonical().key


@pytest.fixture(params=["redis", "valkey", "mooncake", "s3", "obstore"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param != "obstore":
        name = "server" if request.param == "redis" else request.param
        return request.getfixturevalue(name).url("timeout=60")
    return f"obstore+{(tmp_path / 'objects').as_uri()}"


@pytest.fixture
def remote(server: RedisServer) -> Iterator[Redis]:
    yield Redis(server)


class Redis:
    """What a store put into a server, to be looked at and changed behind its back."""

    def __init__(self, server: RedisServer) -> None:
        self.client = server.client()
        self.url = server.url("timeout=60")

    def names(self, folder: str = "objects") -> dict[str, str]:
        """Redis key by object name."""
        keys = [key.decode() for key in self.client.keys("*")]
        return {key.rpartition("/")[2]: key for key in keys if key.split("/")[-2] == folder}

    def read(self, name: str) -> bytes:
        return self.client.get(self.names()[name])

    def write(self, name: str, data: bytes) -> None:
        self.client.set(self.names()[name], data)


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


def test_the_second_look_up_asks_nobody(url: str) -> None:
    with ChunkStore.open(url) as store:
        store.put(canonical())
    with ChunkStore.open(url) as store:
        first = store.get_canonical(CONTEXT, CHUNK)
        calls = StoreAdmin(store).stats().remote.calls  # type: ignore[union-attr]
        assert store.get_canonical(CONTEXT, CHUNK) is first is not None
        assert StoreAdmin(store).stats().remote.calls == calls  # type: ignore[union-attr]


def test_a_patch_is_replaced_and_its_info_follows(url: str) -> None:
    with ChunkStore.open(url) as store, ChunkStore.open(url) as other:
        store.put(patch(rank=1, formed="survivor"))
        store.put(patch(rank=3, formed="patched", seed=9))
        info = other.info(CONTEXT, CHUNK, ("x", "y"))
        assert info is not None and (info.rank, info.formed) == (3, "patched")
        assert other.info(CONTEXT, CHUNK, ("z",)) is None
        assert_same(other.get_patch(CONTEXT, CHUNK, ("x", "y")), patch(rank=3, formed="patched", seed=9))


def test_a_listing_reads_headers_only_and_says_what_is_there(url: str) -> None:
    other = replace(CONTEXT, anchor="b")
    # a header that does not fit into the first bytes that are asked for
    long = canonical("d" * 64, info={"title": "x" * 100_000})
    with ChunkStore.open(url) as store:
        store.put(canonical())
        store.put(long)
        store.put(canonical(context=other))
        store.put(patch())
    with ChunkStore.open(url) as store:
        assert [len(store.ls(kind)) for kind in (None, "canonical", "exact", "orbit")] == [4, 3, 1, 0]
        assert {i.chunk_id for i in store.ls("canonical", context=CONTEXT)} == {CHUNK, "d" * 64}
        assert set(store.contexts_of(CHUNK)) == {CONTEXT, other}
        assert StoreAdmin(store).stats().remote.hits == 0  # type: ignore[union-attr]
        assert StoreAdmin(store).verify().ok == 4


def test_what_is_deleted_is_gone_for_everybody(url: str) -> None:
    with ChunkStore.open(url) as store:
        store.put(canonical())
        assert StoreAdmin(store).delete(KEY) and not StoreAdmin(store).delete(KEY)
        assert store.get_canonical(CONTEXT, CHUNK) is None and store.ls() == []
    with ChunkStore.open(url) as store:
        assert store.get_canonical(CONTEXT, CHUNK) is None


def test_tenants_of_one_remote_do_not_see_each_other(url: str) -> None:
    with ChunkStore.open(url, tenant="me") as mine, ChunkStore.open(url, tenant="you") as yours:
        context = replace(CONTEXT, tenant="me")
        key = mine.put(canonical(context=context))
        assert yours.ls() == [] and yours.contexts_of(CHUNK) == [] and not StoreAdmin(yours).delete(key)
        assert yours.get_canonical(replace(CONTEXT, tenant="you"), CHUNK) is None
        with ChunkStore.open(url, tenant="me") as again:
            assert_same(again.get_canonical(context, CHUNK), canonical(context=context))


def test_a_sealed_tenant_shares_a_remote_by_its_secret(remote: Redis) -> None:
    context = replace(CONTEXT, tenant="acme")
    secret = "a secret of many bytes"
    with ChunkStore.open(remote.url, tenant="acme", secret=secret) as store:
        store.put(canonical(context=context))
    keys = remote.client.keys("*")
    assert len(keys) == 1 and KEY.encode() not in keys[0]
    with ChunkStore.open(remote.url, tenant="acme", secret=secret) as store:
        assert_same(store.get_canonical(context, CHUNK), canonical(context=context))
    for other in (None, "another secret of many bytes"):
        with ChunkStore.open(remote.url, tenant="acme", secret=other) as store:
            assert store.get_canonical(context, CHUNK) is None and store.ls() == []


# -- a remote that lies ----------------------------------------------------------------------------


def newer(data: bytes) -> bytes:
    outer, kamera, rest = split(data)
    return join(outer, kamera | {"format": 99}, rest)


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
def test_a_lie_is_refused_by_name_set_aside_and_then_a_miss(lie: str, remote: Redis) -> None:
    with ChunkStore.open(remote.url) as store:
        store.put(canonical())
    damaged = LIES[lie](remote.read(KEY))
    remote.write(KEY, damaged)
    with ChunkStore.open(remote.url) as store:
        with pytest.raises(CorruptChunk, match=r"redis.*quarantine/") as caught:
            store.get_canonical(CONTEXT, CHUNK)
        assert "\n" not in str(caught.value)
        assert store.get_canonical(CONTEXT, CHUNK) is None
        [(name, key)] = remote.names("quarantine").items()
        assert name.startswith(KEY) and remote.client.get(key) == damaged
        assert StoreAdmin(store).stats().remote.refused == 1  # type: ignore[union-attr]
        store.put(canonical())
    with ChunkStore.open(remote.url) as store:
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


def test_a_remote_that_swaps_everything_serves_nothing(remote: Redis) -> None:
    chunks = [c * 64 for c in "abcdef"]
    with ChunkStore.open(remote.url) as store:
        for i, chunk in enumerate(chunks):
            store.put(canonical(chunk, seed=i))
    keys = list(remote.names().values())
    values = [remote.client.get(key) for key in keys]
    for key, value in zip(keys, values[1:] + values[:1], strict=True):
        remote.client.set(key, value)
    with ChunkStore.open(remote.url) as store:
        for chunk in chunks:
            with pytest.raises(CorruptChunk, match="it is of object"):
                store.get_canonical(CONTEXT, chunk)
        assert len(remote.names("quarantine")) == len(chunks) and not remote.names()


def test_an_old_version_of_a_patch_says_itself_what_it_is_worth(remote: Redis) -> None:
    with ChunkStore.open(remote.url) as store:
        key = store.put(patch(rank=1, formed="survivor"))
        old = remote.read(key)
        store.put(patch(rank=3, formed="exact", seed=9))
    remote.write(key, old)
    with ChunkStore.open(remote.url) as store:
        got = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert_same(got, patch(rank=1, formed="survivor"))


def test_an_object_of_a_newer_format_stays_where_it_is(remote: Redis) -> None:
    with ChunkStore.open(remote.url) as store:
        store.put(canonical())
    data = newer(remote.read(KEY))
    remote.write(KEY, data)
    with ChunkStore.open(remote.url) as store:
        with pytest.raises(StoreVersionError, match="format 99"):
            store.get_canonical(CONTEXT, CHUNK)
        assert store.ls() == []
        assert len(StoreAdmin(store).verify().refused) == 1
    assert remote.read(KEY) == data and not remote.names("quarantine")


def test_damage_is_not_set_aside_over_what_came_in_its_place(
    remote: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(remote.url) as store:
        store.put(canonical())
    good = remote.read(KEY)
    remote.write(KEY, good[:-1])
    with ChunkStore.open(remote.url) as store:
        opened = Codec.open

        def overtaken(self: Codec, source: BytesSource, name: str, where: str) -> object:
            remote.write(KEY, good)
            return opened(self, source, name, where)

        with monkeypatch.context() as patched:
            patched.setattr(Codec, "open", overtaken)
            with pytest.raises(CorruptChunk, match="replaced meanwhile"):
                store.get_canonical(CONTEXT, CHUNK)
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
    assert not remote.names("quarantine")


def test_who_asks_for_the_info_of_a_damaged_object_sets_it_aside(remote: Redis) -> None:
    with ChunkStore.open(remote.url) as store:
        store.put(canonical())
    remote.write(KEY, remote.read(KEY)[:150])
    with ChunkStore.open(remote.url) as store:
        with pytest.raises(CorruptChunk, match="moved to"):
            store.info(CONTEXT, CHUNK)
        assert store.info(CONTEXT, CHUNK) is None
    assert remote.names("quarantine")


def test_verify_reads_everything_and_tells_what_is_damaged(remote: Redis) -> None:
    with ChunkStore.open(remote.url) as store:
        store.put(canonical())
        store.put(patch())
        remote.write(KEY, remote.read(KEY)[:-1])
        report = StoreAdmin(store).verify()
    assert report.ok == 1 and len(report.quarantined) == 1 and KEY in report.quarantined[0]


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


def test_what_cannot_be_deleted_is_an_error_and_stays(server: RedisServer) -> None:
    with ChunkStore.open(server.url()) as store:
        store.put(canonical())
        assert not store.flush(30).unsaved
        server.pause()
        with ChunkStore.open(server.url("timeout=0.1&retries=0")) as hasty:  # it asks while nobody answers
            with pytest.raises(RemoteUnavailable):
                StoreAdmin(hasty).delete(KEY)
            with pytest.raises(RemoteUnavailable):
                StoreAdmin(hasty).delete("0" * 64)  # nobody can tell whether there is one
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
        server.resume()
    with ChunkStore.open(server.url()) as store:
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


def test_after_a_killed_server_only_memory_serves(server: RedisServer) -> None:
    with ChunkStore.open(server.url()) as store:
        for chunk in "abcd":
            store.put(canonical(chunk))
    with ChunkStore.open(server.url("timeout=60&retries=0&cooldown=0.05")) as store:
        assert store.get_canonical(CONTEXT, "a") is not None
        server.kill()
        assert [store.get_canonical(CONTEXT, c) is not None for c in "abcd"] == [True, False, False, False]
        store.put(canonical("e"))
        assert_same(store.get_canonical(CONTEXT, "e"), canonical("e"))
        assert len(store.flush(0.05).unsaved) == 1
        server.start()  # empty: it kept nothing
        assert not store.flush(30).unsaved
        assert store.get_canonical(CONTEXT, "b") is None
    with ChunkStore.open(server.url()) as store:
        assert_same(store.get_canonical(CONTEXT, "e"), canonical("e"))


def test_a_server_out_of_memory_serves_and_what_is_put_waits(server: RedisServer) -> None:
    with ChunkStore.open(server.url("timeout=60&retries=0&cooldown=0.05")) as store:
        store.put(canonical("a"))
        client = server.client()
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        store.put(canonical("b"))
        assert store.flush(0.1).unsaved == (canonical("b").key,)
        assert "maxmemory" in StoreAdmin(store).stats().remote.last_error  # type: ignore[union-attr]
        with ChunkStore.open(server.url("timeout=60")) as other:
            assert_same(other.get_canonical(CONTEXT, "a"), canonical("a"))
            assert other.get_canonical(CONTEXT, "b") is None
        client.config_set("maxmemory", "0")
        assert not store.flush(30).unsaved
    with ChunkStore.open(server.url("timeout=60")) as store:
        assert_same(store.get_canonical(CONTEXT, "b"), canonical("b"))


def test_a_key_of_something_else_is_refused_by_name(remote: Redis, server: RedisServer) -> None:
    with ChunkStore.open(remote.url) as store:
        store.put(canonical())
        [key] = remote.names().values()
        remote.client.delete(key)
        remote.client.rpush(key, b"a list, no value")
    with ChunkStore.open(remote.url) as store:
        with pytest.raises(ForeignKey, match="another type"):
            store.get_canonical(CONTEXT, CHUNK)
        assert StoreAdmin(store).stats().remote.failures == 0  # type: ignore[union-attr]


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


@pytest.mark.parametrize("query", ["timeout=0", "timeout=soon", "retries=-1", "timeout=nan", "cooldown=0"])
def test_limits_that_are_none_are_refused(query: str) -> None:
    with pytest.raises(ValueError, match=r"timeout.*retries"):
        ChunkStore.open(f"redis://host?{query}")


def test_a_url_that_its_library_does_not_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for url in ("s3://", f"obstore+file://{tmp_path}/file/below"):
        with pytest.raises(StoreError, match="cannot open") as caught:
            ChunkStore.open(url)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module, url", [("redis", "redis://host"), ("obstore", "s3://bucket")])
def test_a_missing_library_is_told_with_its_extra(
    module: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for driver in ("redis", "objects"):
        monkeypatch.delitem(sys.modules, f"kamera.store.remote.{driver}", raising=False)
    with pytest.raises(StoreError, match=r"kamera\[remote\]"):
        ChunkStore.open(url)


def test_a_cache_or_its_limit_without_a_remote_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="remote"):
        ChunkStore.open(tmp_path / "s", cache=tmp_path / "c")
    with pytest.raises(ValueError, match="cache"):
        ChunkStore.open("redis://host", disk_limit="1GiB")
    assert not list(tmp_path.iterdir())
