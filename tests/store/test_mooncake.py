"""Mooncake's own ways: what it cannot do is refused by name, and what it loses is a miss."""

from __future__ import annotations

from pathlib import Path

import pytest

from kamera.errors import RemoteUnavailable, StoreError
from kamera.store import ChunkStore, StoreAdmin
from tests.servers.mooncake_server import MooncakeServer
from tests.store.builders import CHUNK, CONTEXT, assert_same, canonical
from tests.store.test_forks import in_child


def test_pins_are_refused_by_name_and_change_nothing(mooncake: MooncakeServer) -> None:
    with ChunkStore.open(mooncake.url()) as store:
        key = store.put(canonical())
        with pytest.raises(StoreError, match="Mooncake evicts what it holds, so it has no pins"):
            StoreAdmin(store).pin([key])
        assert list(StoreAdmin(store).pins.list()) == []
        assert StoreAdmin(store).verify().ok == 1


def test_what_dies_with_its_memory_is_a_miss_and_a_cache_sends_it_again(
    mooncake: MooncakeServer, tmp_path: Path
) -> None:
    url = mooncake.url("timeout=2&retries=0&cooldown=0.1")
    with ChunkStore.open(url, memory_limit=0) as store:
        store.put(canonical())
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
        mooncake.kill()
        assert store.get_canonical(CONTEXT, CHUNK) is None
        with pytest.raises(RemoteUnavailable, match="Mooncake answered -90"):
            StoreAdmin(store).reach()
    with ChunkStore.open(url, cache=tmp_path / "cache") as store:
        store.put(canonical("d" * 64))
        assert store.flush(0.05).unsaved == (canonical("d" * 64).key,)
        mooncake.start()
        assert store.flush(60).unsaved == ()
    with ChunkStore.open(url) as store:
        assert store.get_canonical(CONTEXT, CHUNK) is None
        assert_same(store.get_canonical(CONTEXT, "d" * 64), canonical("d" * 64))


def test_a_forked_child_of_one_that_used_it_is_refused_and_never_hangs(mooncake: MooncakeServer) -> None:
    with ChunkStore.open(mooncake.url()) as store:
        store.put(canonical())
        said = in_child(lambda: ChunkStore.open(mooncake.url()))
    assert said.startswith("ForkedStore: cannot open mooncake://") and "has used Mooncake" in said


def test_options_that_nobody_knows_are_refused(mooncake: MooncakeServer) -> None:
    with pytest.raises(StoreError, match="segment: give metrics, protocol, devices"):
        ChunkStore.open(mooncake.url("segment=1"))
