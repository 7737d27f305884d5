"""Many objects at once: the same as one by one, and side by side where each waits for a remote."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kamera.errors import CorruptChunk
from kamera.store import ChunkStore
from kamera.store.remote import RemoteTier
from tests.store.builders import CHUNK, CONTEXT, assert_same, canonical, file_of, flip, patch

CHUNKS = [f"{n:064x}" for n in range(5)]
RECORDS = [canonical(chunk, seed=n) for n, chunk in enumerate(CHUNKS)]


@pytest.fixture(params=["directory", "memory", "remote"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    remote = f"obstore+{(tmp_path / 'far').as_uri()}"
    return {"directory": str(tmp_path / "store"), "memory": "memory://", "remote": remote}[request.param]


def test_many_are_what_they_are_one_by_one(url: str) -> None:
    with ChunkStore.open(url) as store:
        for record in (*RECORDS, patch()):
            store.put(record)
        found = store.get_many(CONTEXT, [CHUNKS[3], CHUNK, *CHUNKS])
        assert found[1] is None
        for record, one in zip([RECORDS[3], *RECORDS], [found[0], *found[2:]], strict=True):
            assert_same(one, record)
        assert_same(store.get_patch(CONTEXT, CHUNK, ("x", "y")), patch())
        assert store.get_many(CONTEXT, []) == []


def test_one_damaged_object_leaves_the_others_stored_and_read(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "store", memory_limit=0) as store:
        keys = [store.put(record) for record in RECORDS]
        flip(file_of(tmp_path / "store", keys[2]))
        with pytest.raises(CorruptChunk):
            store.get_many(CONTEXT, CHUNKS)
        assert [found is None for found in store.get_many(CONTEXT, CHUNKS)] == [n == 2 for n in range(5)]


def test_calls_of_a_remote_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until all have begun: one by one that would never be."""
    everyone = threading.Barrier(len(RECORDS), timeout=300)

    def met(call: str) -> None:
        real = getattr(RemoteTier, call)

        def waits(self: RemoteTier, *given: object) -> object:
            everyone.wait()
            return real(self, *given)

        monkeypatch.setattr(RemoteTier, call, waits)

    met("get")
    with ChunkStore.open(f"obstore+{(tmp_path / 'far').as_uri()}", memory_limit=0) as store:
        for record in RECORDS:
            store.put(record)
        assert all(found is not None for found in store.get_many(CONTEXT, CHUNKS))
