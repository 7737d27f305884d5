"""Readers and writers of one directory at once, in threads and in processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from kamera.store import ChunkStore, StoreAdmin
from tests.store.builders import CHUNK, CONTEXT, canonical, patch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_readers_see_the_old_or_new_patch_during_writes(root: Path) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        store.put(patch(rank=1))
        done = threading.Event()
        seen: set[int] = set()

        def reads() -> None:
            while not done.is_set():
                got = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
                assert got is not None
                seen.add(got.patch.rank)

        def writes(rank: int) -> None:
            store.put(canonical(str(rank)))
            store.put(patch(rank=rank))

        with ThreadPoolExecutor(6) as pool:
            readers = [pool.submit(reads) for _ in range(2)]
            try:
                list(pool.map(writes, range(1, 33)))
            finally:
                done.set()
            for reader in readers:
                reader.result()
        assert seen <= set(range(1, 33))
        assert len(store.ls("canonical")) == 32
        [row] = store.ls("exact")
        final = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert final is not None and row.rank == final.patch.rank
        assert StoreAdmin(store).verify().ok == 33 and list((root / "tmp").iterdir()) == []


def test_a_row_written_behind_a_deletion_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store, ChunkStore.open(root) as other, ThreadPoolExecutor(1) as pool:
        key = store.put(canonical())
        assert len(store.ls()) == len(other.ls()) == 1  # from now on none compares all names
        disk = store._disk
        assert disk is not None
        drop = disk.index.drop
        put: list[Any] = []

        def overtaken(name: str) -> bool:
            put.append(pool.submit(other.put, canonical()))
            wait(put, 0.5)  # where the lock is free by now, it is put before the row is dropped
            return drop(name)

        monkeypatch.setattr(disk.index, "drop", overtaken)
        StoreAdmin(store).delete(key)
        assert put[0].result(60) == key
        assert [info.key for info in store.ls()] == [info.key for info in other.ls()] == [key]
