"""Memory of records that are gone serves the next ones, and never while anyone can still see it."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
import torch

from kamera.store import ChunkStore, slabs
from kamera.store.slabs import allocate_bytes
from tests.store.builders import CONTEXT, canonical, tensor

SIZE = 5 << 20


@pytest.fixture(autouse=True)
def none_left_over() -> None:
    gc.collect()
    slabs._free.clear()


def test_memory_is_taken_over_once_its_last_view_is_gone() -> None:
    memory = allocate_bytes(SIZE)
    place = memory.data_ptr()
    view = memory[100:200].view(torch.int16).reshape(5, 10)
    raw = memory.numpy().data
    del memory
    others = [allocate_bytes(SIZE)]  # two views are left
    del view
    others.append(allocate_bytes(SIZE))
    assert all(other.data_ptr() != place for other in others)
    del raw
    again = allocate_bytes(SIZE - 1000)
    assert again.data_ptr() == place and again.numel() == SIZE - 1000


@pytest.mark.parametrize("other", [2 * SIZE, SIZE // 2 - 1, 100])
def test_memory_of_another_size_is_not_taken_over(other: int) -> None:
    place = allocate_bytes(SIZE).data_ptr()
    assert slabs._free[0].ctypes.data == place
    made = allocate_bytes(other)
    assert made.numel() == other and made.data_ptr() != place


def test_no_more_than_two_are_held_back() -> None:
    held = [allocate_bytes(SIZE) for _ in range(5)]
    del held
    assert len(slabs._free) == 2
    assert sum(slab.nbytes for slab in slabs._free) == 2 * SIZE


def test_a_layer_in_use_is_not_overwritten_by_the_next_read(tmp_path: Path) -> None:
    def record(seed: int) -> object:
        layers = tuple({"k": tensor((2, 3, 250_000), torch.bfloat16, 10 * seed + i)} for i in range(2))
        return canonical(str(seed), kv=layers)

    records = [record(seed) for seed in range(3)]
    with ChunkStore.open(tmp_path / "s", memory_limit=0) as store:
        for one in records:
            store.put(one)  # type: ignore[arg-type]
        first = store.get_canonical(CONTEXT, "0")
        assert first is not None
        kept = first.kv[1]["k"]
        copy = kept.clone()
        del first
        for _ in range(3):
            for seed in (1, 2):
                assert_equal(store.get_canonical(CONTEXT, str(seed)), records[seed])
        assert torch.equal(kept.view(torch.uint8), copy.view(torch.uint8))


def test_threads_that_read_at_once_do_not_share_memory(tmp_path: Path) -> None:
    layers = [tuple({"k": tensor((2, 3, 450_000), torch.bfloat16, seed)} for _ in "x") for seed in range(4)]
    records = [canonical(str(seed), kv=kv) for seed, kv in enumerate(layers)]
    wrong: list[int] = []

    def reads(store: ChunkStore, seed: int) -> None:
        for _ in range(6):
            found = store.get_canonical(CONTEXT, str(seed))
            if found is None or not torch.equal(
                found.kv[0]["k"].view(torch.uint8), records[seed].kv[0]["k"].view(torch.uint8)
            ):
                wrong.append(seed)

    with ChunkStore.open(tmp_path / "s", memory_limit=0) as store:
        for one in records:
            store.put(one)
        threads = [threading.Thread(target=reads, args=(store, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def assert_equal(found: object, record: object) -> None:
    for mine, theirs in zip(found.kv, record.kv, strict=True):  # type: ignore[attr-defined]
        assert torch.equal(mine["k"].view(torch.uint8), theirs["k"].view(torch.uint8))
