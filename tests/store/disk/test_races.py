"""Readers and writers of one directory at once, in threads and in processes."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera.errors import CorruptChunk
from kamera.ops.patch import LowRank, Patch
from kamera.store import ChunkStore, Context, PatchRecord, StoreAdmin
from kamera.store.codec import Codec
from tests.store.builders import CHUNK, CONTEXT, canonical, file_of, flip, patch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_slow_reader_does_not_restore_the_old_files_row(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        store.put(patch(rank=1))

        def overtaken(*arguments: Any, **named: Any) -> Any:
            monkeypatch.undo()
            store.put(patch(rank=2))
            return Codec.open(*arguments, **named)

        monkeypatch.setattr(Codec, "open", overtaken)
        got = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert got is not None and got.patch.rank == 1
        assert [i.rank for i in store.ls()] == [2]


def test_a_just_replaced_file_is_not_quarantined(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        flip(file_of(root, store.put(patch(rank=1))))

        def overtaken(*arguments: Any, **named: Any) -> Any:
            monkeypatch.undo()
            store.put(patch(rank=2))
            return Codec.open(*arguments, **named)

        monkeypatch.setattr(Codec, "open", overtaken)
        with pytest.raises(CorruptChunk):
            store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        got = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert got is not None and got.patch.rank == 2


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


def fill(root: Path, me: int, ready: Any) -> None:
    ready.wait()
    with ChunkStore.open(root) as store:
        for i in range(15):
            for name in ("shared", f"own{me}"):
                factors = LowRank(torch.full((3, me), me), torch.full((8, me), me))
                fixed = Patch.of(({"v": factors},))
                store.put(PatchRecord(f"{name}{i}", Context("f", "a"), (), "exact", fixed, ""))


def test_two_processes_make_and_fill_one_store(root: Path) -> None:
    fork = multiprocessing.get_context("fork")  # the others import torch once more, for seconds
    ready = fork.Barrier(2)
    writers = [fork.Process(target=fill, args=(root, me, ready)) for me in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(300)
    assert [writer.exitcode for writer in writers] == [0, 0]
    with ChunkStore.open(root) as store:
        assert len(store.ls()) == 45
        assert StoreAdmin(store).verify().ok == 45
        for i in range(15):
            got = store.get_patch(Context("f", "a"), f"shared{i}", ())
            assert got is not None
            left = got.patch.layers[0]["v"].left
            assert left.shape[1] == int(left[0, 0])


def test_another_process_view_of_a_replacement_and_a_deletion(root: Path) -> None:
    with ChunkStore.open(root) as one, ChunkStore.open(root) as two:
        key = one.put(patch(rank=1))
        assert one.get_patch(CONTEXT, CHUNK, ("x", "y")) is not None
        two.put(patch(rank=4))
        got = one.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert got is not None and got.patch.rank == 4
        assert StoreAdmin(two).delete(key)
        assert one.get_patch(CONTEXT, CHUNK, ("x", "y")) is None


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
