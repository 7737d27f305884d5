"""Branches share one store; what one does to its objects never shows in what another has in its window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kamera import ChunkStore
from kamera.ops import LowRank, Patch
from kamera.store import StoreAdmin
from kamera.window import former_of

from .rig import Snapshot, make, rig


def files(store: ChunkStore) -> list[Path]:
    assert store._disk is not None
    root = store._disk.root / "objects"
    return [root / f"{info.key}.safetensors" for info in store.ls()]


def delete_all(store: ChunkStore) -> None:
    for info in store.ls():
        assert StoreAdmin(store).delete(info.key)


def overwrite_in_place(store: ChunkStore) -> None:
    """What no store does: it would show in tensors that were mapped from the files."""
    for path in files(store):
        size = path.stat().st_size
        with open(path, "r+b") as file:
            file.seek(size // 2)
            file.write(b"\x3f" * (size - size // 2))


def set_aside(store: ChunkStore) -> None:
    overwrite_in_place(store)
    assert len(StoreAdmin(store).verify().quarantined) > 2


def replace_patches(store: ChunkStore) -> None:
    """Other factors under the same keys."""
    for info in store.ls("exact"):
        record = store.get_patch(info.context, info.chunk_id, info.antecedents)
        assert record is not None
        layers = [
            {n: LowRank(f.left * 0 + 1, f.right * 0 + 1) for n, f in layer.items()}
            for layer in record.patch.layers
        ]
        store.put(replace(record, patch=Patch.of(layers, record.patch.groups)))


@pytest.mark.parametrize("change", [delete_all, overwrite_in_place, set_aside, replace_patches])
def test_objects_that_change_in_the_store_change_in_no_window(
    tmp_path: Path, change: Callable[[ChunkStore], None]
) -> None:
    backbone, chunks = rig("qwen2_5_vl")
    with ChunkStore.open(tmp_path / "store") as store:
        make(backbone, store, *chunks)
    with ChunkStore.open(tmp_path / "store") as store:  # so that they come from the files
        window = make(backbone, store)
        for chunk in chunks:
            window.recall(chunk.id)
        assert {slot.guarantee for slot in window.slots} <= {"exact", "patched"}
        branch = window.fork()
        before = Snapshot.of(window)
        branch.evict(0)
        change(former_of(branch).store)
        assert before.matches(window)
        window.slide()
        branch.slide()
        assert (len(window), len(branch)) == (len(chunks) - 1, len(chunks) - 2)
