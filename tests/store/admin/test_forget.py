"""Forgetting: afterwards nothing of the chunk is left, wherever it was, and everything else is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kamera.errors import RemoteUnavailable, StoreError
from kamera.store import ChunkStore, Context, StoreAdmin, survivor_id
from kamera.store.disk.tier import DiskTier
from kamera.store.remote.listing import Listing
from kamera.store.search.embedding import pack, unit_vector
from lab.reliability.redis_server import RedisServer
from tests.store.builders import (
    CONTEXT,
    VISION,
    anchor,
    assert_same,
    canonical,
    encode,
    encoding,
    join,
    patch,
    split,
    tensor,
)

GONE, KEPT = "d" * 64, "e" * 64
OTHER = Context("g" * 64, "b" * 64)
SECRET, KEY = b"a secret of acme, 32 bytes long!", b"k" * 32
PICTURE = 9

STORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sealed": {"secret": SECRET},
    "encrypted": {"secret": SECRET, "keys": [KEY]},
}


def picture(chunk: str, context: Context = CONTEXT, seed: int = 0) -> Any:
    return canonical(
        chunk,
        context,
        seed=seed,
        input_ids=torch.tensor([PICTURE, PICTURE, 2]),
        vision=VISION,
        embedding=pack(unit_vector(np.arange(1.0, 5.0) + seed)),
    )


def fill(store: ChunkStore) -> tuple[set[str], set[str]]:
    """Names of what must go, and of what must stay."""
    go = {
        store.put(encoding(GONE, seed=1)),
        store.put(encoding(GONE, "o" * 64, seed=1)),
        store.put(picture(GONE, seed=1)),
        store.put(picture(GONE, OTHER, seed=2)),
        store.put(patch(GONE)),
        store.put(patch(GONE, kind="orbit")),
        store.put(patch(KEPT, antecedents=("x", GONE))),
        store.put(patch(KEPT, antecedents=(GONE, "x"), kind="orbit")),
    }
    stay = {
        store.put(encoding(KEPT, seed=3)),
        store.put(anchor(seed=9)),
        store.put(picture(KEPT, seed=3)),
        store.put(patch(KEPT)),
        store.put(patch(KEPT, OTHER)),
    }
    return go, stay


def root_of(store: ChunkStore) -> Path:
    assert store._disk is not None
    return store._disk.root


def file_of(store: ChunkStore, name: str) -> Path:
    return root_of(store) / "objects" / f"{name}.safetensors"


def bytes_below(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("options", STORES.values(), ids=STORES)
def test_nothing_of_the_chunk_is_left_and_everything_else_is(root: Path, options: dict[str, Any]) -> None:
    with ChunkStore.open(root, **options) as store:
        go, stay = fill(store)
        StoreAdmin(store).pin(sorted(go))
        assert store.embedding(CONTEXT, GONE) is not None
        done = StoreAdmin(store).forget(GONE)
        assert (set(done.removed), done.left) == (go, ())
        assert {info.key for info in store.ls()} == stay
        assert store.contexts_of(GONE) == [] and store.get_canonical(CONTEXT, GONE) is None
        assert store.embedding(CONTEXT, GONE) is None and StoreAdmin(store).pins.list() == []
        assert store.embedding(CONTEXT, KEPT) is not None
        held = store.get_canonical(CONTEXT, KEPT)
        assert_same(held, picture(KEPT, seed=3))
        assert_same(store.get_patch(CONTEXT, KEPT, ("x", "y")), patch(KEPT))
        assert StoreAdmin(store).verify().ok == len(stay)
        held = bytes_below(root)
        assert not [name for name in go if name.encode() in held]
    held = bytes_below(root)
    for forgotten in (*go, GONE):
        assert forgotten.encode() not in held
    assert tensor((2, 3, 4), torch.bfloat16, 1).view(torch.uint8).numpy().tobytes() not in held
    assert all(name.encode() in held for name in stay)


@pytest.mark.parametrize("options", STORES.values(), ids=STORES)
def test_a_patch_behind_a_survivor_goes_with_any_chunk(root: Path, options: dict[str, Any]) -> None:
    """It does not name all that it absorbed."""
    with ChunkStore.open(root, memory_limit=0, **options) as store:
        _, stay = fill(store)
        blurred = store.put(patch(KEPT, antecedents=(survivor_id("x", "l" * 32),)))
        assert blurred in StoreAdmin(store).forget(GONE).removed
        assert {info.key for info in store.ls()} == stay


def test_what_was_never_there_is_forgotten_without_a_trace(root: Path) -> None:
    with ChunkStore.open(root) as store:
        _, stay = fill(store)
        count = len(store.ls())
        done = StoreAdmin(store).forget("0" * 64)
        assert (done.removed, done.copies, done.left) == ((), 0, ())
        assert len(store.ls()) == count > len(stay)


def test_a_store_in_memory_forgets(root: Path) -> None:
    with ChunkStore.open("memory://") as store:
        go, stay = fill(store)
        done = StoreAdmin(store).forget(GONE)
        assert (set(done.removed), done.left) == (go, ())
        assert {info.key for info in store.ls()} == stay
        assert store.embedding(CONTEXT, GONE) is None


def test_the_files_are_looked_at_and_not_the_index(root: Path) -> None:
    with ChunkStore.open(root) as store:
        go, stay = fill(store)
        assert store._disk is not None
        unlisted, lost = sorted(go)[:2]
        store._disk.index.drop(unlisted)  # a file without a row, a row without a file
        file_of(store, lost).unlink()
        done = StoreAdmin(store).forget(GONE)
        assert (set(done.removed), done.left) == (go, ())
        assert {path.stem for path in root.glob("objects/*")} == stay
        assert {info.key for info in store.ls()} == stay


def damage(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("options", STORES.values(), ids=STORES)
def test_copies_in_quarantine_leave_too(root: Path, options: dict[str, Any]) -> None:
    with ChunkStore.open(root, **options) as store:
        go, stay = fill(store)
        for name in (*sorted(go), min(stay)):
            damage(file_of(store, name), -1)  # in the tensors: the header still tells whose it is
        assert len(StoreAdmin(store).verify().quarantined) == len(go) + 1
        done = StoreAdmin(store).forget(GONE)
        assert (done.copies, done.left) == (len(go), ())
        assert [copy.name for copy in StoreAdmin(store).quarantine.copies()] == [min(stay)]


def test_an_unreadable_copy_is_matched_by_name_or_reported(root: Path) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        fill(store)
        for record in (canonical(GONE), patch(GONE)):
            damage(file_of(store, record.key), 120)  # in the header
        assert len(StoreAdmin(store).verify().quarantined) == 2
        done = StoreAdmin(store).forget(GONE)
        assert done.copies == 1  # the canonical's name follows from the chunk
        [left] = done.left
        assert patch(GONE).key in left and "cannot be read" in left
        StoreAdmin(store).quarantine.drop(patch(GONE).key)
        assert StoreAdmin(store).forget(GONE).left == ()


def test_an_object_that_cannot_be_read_here_is_said_to_be_left(root: Path) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        fill(store)
        outer, header, rest = split(encode(patch(GONE), 1.0))
        file_of(store, patch(GONE).key).write_bytes(join(outer, header | {"format": 9}, rest))
        done = StoreAdmin(store).forget(GONE)
        [left] = done.left
        assert patch(GONE).key in left and "format 9" in left
    with ChunkStore.open(root.parent / "e", secret=SECRET, keys=[KEY]) as store:
        name = store.put(canonical(GONE))
    for path in (root.parent / "e").rglob("index.sqlite*"):
        path.unlink()
    with ChunkStore.open(root.parent / "e", secret=SECRET, keys=[b"n" * 32]) as store:
        [left] = [line for line in StoreAdmin(store).forget(GONE).left if "cannot be read" in line]
        assert name in left


def test_a_damaged_object_is_forgotten_with_the_rest(root: Path) -> None:
    with ChunkStore.open(root) as store:
        go, _ = fill(store)
        damage(file_of(store, canonical(GONE).key), 120)  # not noticed yet
        done = StoreAdmin(store).forget(GONE)
        assert (done.copies, done.left) == (1, ())
        assert set(done.removed) | {canonical(GONE).key} == go


def test_forget_removes_dead_writers_files_and_reports_live(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root) as store:
        fill(store)
        part = root / "tmp" / f"{canonical(GONE).key}.part"
        part.write_bytes(encode(canonical(GONE), 1.0))
        assert StoreAdmin(store).forget(GONE).left == ()
        assert not part.exists()
        part.write_bytes(encode(canonical(GONE), 1.0))
        monkeypatch.setattr(DiskTier, "remove_leftovers", lambda self: 0)  # as if its writer lived
        [left] = StoreAdmin(store).forget(GONE).left
        assert part.name in left


def test_another_tenants_objects_of_the_same_chunk_stay(root: Path) -> None:
    with ChunkStore.open(root, tenant="acme") as mine, ChunkStore.open(root, tenant="beta") as theirs:
        for store in (mine, theirs):
            store.put(canonical(GONE, replace(CONTEXT, tenant=store.tenant)))
        done = StoreAdmin(mine).forget(GONE)
        assert (len(done.removed), done.left) == (1, ())
        assert theirs.contexts_of(GONE) and len(StoreAdmin(theirs).forget(GONE).removed) == 1


def test_one_that_is_interrupted_is_run_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store:
        go, stay = fill(store)
        delete: Callable[..., bool] = DiskTier.delete
        calls: list[str] = []

        def dies(self: DiskTier, key: str) -> bool:
            calls.append(key)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return delete(self, key)

        monkeypatch.setattr(DiskTier, "delete", dies)
        with pytest.raises(KeyboardInterrupt):
            StoreAdmin(store).forget(GONE)
        monkeypatch.undo()
        done = StoreAdmin(store).forget(GONE)
        assert go - set(calls[:2]) <= set(done.removed) <= go and done.left == ()
        assert {info.key for info in store.ls()} == stay


# -- remote ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True], ids=["remote", "remote behind a directory"])
def test_a_remote_forgets_too_its_damaged_copies_included(tmp_path: Path, cached: bool) -> None:
    pytest.importorskip("obstore")
    url = f"obstore+file://{tmp_path / 'remote'}"
    options = {"secret": SECRET, "cache": tmp_path / "cache" if cached else None}
    with ChunkStore.open(url, **options) as store:
        go, stay = fill(store)
        assert store.flush().unsaved == ()
        victim = min(go)
        [blob] = (tmp_path / "remote").rglob(f"objects/{victim}*")
        damage(blob, -1)
        assert len(StoreAdmin(store).verify().quarantined) == 1
        done = StoreAdmin(store).forget(GONE)
        assert done.left == () and done.copies == 1
        assert {info.key for info in store.ls()} == stay
    held = bytes_below(tmp_path)
    assert GONE.encode() not in held
    names = {path.name for path in tmp_path.rglob("*")}
    assert not [name for name in go if any(name in file for file in names)]


def test_forget_with_a_dead_remote_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    with ChunkStore.open(f"obstore+file://{tmp_path / 'remote'}", cache=tmp_path / "cache") as store:
        fill(store)
        store.flush()
        before = {info.key for info in store.ls()}

        def down(self: Listing, **_: bool) -> Any:
            raise RemoteUnavailable("down")

        monkeypatch.setattr(Listing, "infos", down)
        with pytest.raises(RemoteUnavailable):
            StoreAdmin(store).forget(GONE)
        monkeypatch.undo()
        assert {info.key for info in store.ls()} == before


def test_what_waited_to_be_sent_leaves_no_name_behind(server: RedisServer, tmp_path: Path) -> None:
    """Neither in the list of uploads nor in any other file: freed pages are overwritten."""
    cache = tmp_path / "cache"
    url = server.url("timeout=60&cooldown=0.01")
    with ChunkStore.open(url, cache=cache, memory_limit=0) as store:
        sent = store.put(canonical(GONE))
        StoreAdmin(store).pin([sent])
        assert not store.flush(30).unsaved
        assert store.get_canonical(CONTEXT, GONE) is not None
        server.kill()
        waiting = store.put(patch(GONE))
        assert StoreAdmin(store).stats().remote.pending == 1  # type: ignore[union-attr]
        with pytest.raises(RemoteUnavailable):
            StoreAdmin(store).forget(GONE)
        assert StoreAdmin(store).stats().remote.pending == 1  # type: ignore[union-attr]
        server.start()
        time.sleep(0.02)
        store.flush(30)
        assert any(name.encode() in bytes_below(cache) for name in (sent, waiting))
        assert StoreAdmin(store).forget(GONE).left == ()
        assert StoreAdmin(store).stats().remote.pending == 0  # type: ignore[union-attr]
        for name in (GONE, sent, waiting):
            assert name.encode() not in bytes_below(cache)
            assert not [key for key in server.client().keys("*") if name in key.decode()]


def test_a_cache_does_not_claim_to_forget_for_its_remote(tmp_path: Path) -> None:
    url = f"obstore+file://{tmp_path / 'remote'}"
    with ChunkStore.open(url, cache=tmp_path / "cache") as store:
        key = store.put(canonical(GONE))
        store.flush(30)
    with ChunkStore.open(tmp_path / "cache") as store:
        with pytest.raises(StoreError, match=r"cache of obstore\+file.*open that.*forget"):
            StoreAdmin(store).forget(GONE)
        assert [info.key for info in store.ls()] == [key]
