"""Many objects at once: the same as one by one, and side by side where each waits for a remote."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kamera.errors import CorruptChunk, IncompatibleChunk
from kamera.store import ChunkStore, Context
from kamera.store.remote import RemoteTier

from .builders import CHUNK, CONTEXT, assert_same, canonical, file_of, flip, patch

CHUNKS = [f"{n:064x}" for n in range(5)]
RECORDS = [canonical(chunk, seed=n) for n, chunk in enumerate(CHUNKS)]


@pytest.fixture(params=["directory", "memory", "remote"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    remote = f"obstore+{(tmp_path / 'far').as_uri()}"
    return {"directory": str(tmp_path / "store"), "memory": "memory://", "remote": remote}[request.param]


def test_many_are_what_they_are_one_by_one(url: str) -> None:
    with ChunkStore.open(url) as store:
        keys = store.put_many([*RECORDS, patch()])
        assert keys == [*(record.key for record in RECORDS), patch().key]
        found = store.get_many(CONTEXT, [CHUNKS[3], CHUNK, *CHUNKS])
        assert found[1] is None
        for record, one in zip([RECORDS[3], *RECORDS], [found[0], *found[2:]], strict=True):
            assert_same(one, record)
        assert_same(store.get_patch(CONTEXT, CHUNK, ("x", "y")), patch())
        assert store.get_many(CONTEXT, []) == [] and store.put_many([]) == []


def test_one_damaged_object_leaves_the_others_stored_and_read(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", memory_limit=0) as store:
        keys = store.put_many(RECORDS)
        flip(file_of(tmp_path / "store", keys[2]))
        with pytest.raises(CorruptChunk):
            store.get_many(CONTEXT, CHUNKS)
        assert [found is None for found in store.get_many(CONTEXT, CHUNKS)] == [n == 2 for n in range(5)]


def test_another_tenants_record_is_refused_and_the_others_are_put(tmp_path: Path) -> None:
    stranger = canonical("e" * 64, Context("f" * 64, "a" * 64, "acme"))
    with ChunkStore.open(f"obstore+{(tmp_path / 'far').as_uri()}") as store:
        with pytest.raises(IncompatibleChunk):
            store.put_many([RECORDS[0], stranger, RECORDS[1]])
        assert {info.key for info in store.ls()} == {RECORDS[0].key, RECORDS[1].key}


def test_calls_of_a_remote_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until all have begun: one by one that would never be."""
    everyone = threading.Barrier(len(RECORDS), timeout=300)

    def met(call: str) -> None:
        real = getattr(RemoteTier, call)

        def waits(self: RemoteTier, *given: object) -> object:
            everyone.wait()
            return real(self, *given)

        monkeypatch.setattr(RemoteTier, call, waits)

    met("put")
    met("get")
    with ChunkStore.open(f"obstore+{(tmp_path / 'far').as_uri()}", memory_limit=0) as store:
        store.put_many(RECORDS)
        assert all(found is not None for found in store.get_many(CONTEXT, CHUNKS))
