"""Forgetting: afterwards nothing of the chunk is left, wherever it was, and everything else is."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kamera.errors import AmbiguousId, RemoteUnavailable, UnknownChunk
from kamera.store import ChunkStore, Context, StoreAdmin
from kamera.store.directory import Directory
from kamera.store.remote import Remote
from kamera.store.search import pack, unit_vector
from tests.store.builders import (
    CONTEXT,
    VISION,
    anchor,
    assert_same,
    canonical,
    encoding,
    patch,
    snapshot,
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


def bytes_below(root: Path) -> bytes:
    return b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.few(2)
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


def damage(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_one_that_is_interrupted_is_run_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store:
        go, stay = fill(store)
        delete: Callable[..., bool] = Directory.delete
        calls: list[str] = []

        def dies(self: Directory, key: str) -> bool:
            calls.append(key)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return delete(self, key)

        monkeypatch.setattr(Directory, "delete", dies)
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

        def down(self: Remote, **_: bool) -> Any:
            raise RemoteUnavailable("down")

        monkeypatch.setattr(Remote, "infos", down)
        with pytest.raises(RemoteUnavailable):
            StoreAdmin(store).forget(GONE)
        monkeypatch.undo()
        assert {info.key for info in store.ls()} == before


# -- bytes ------------------------------------------------------------------------------------


def chunk(n: int) -> str:
    return hashlib.sha256(str(n).encode()).hexdigest()


def fill_many(store: ChunkStore, count: int) -> None:
    """So many chunks with one patch each behind others, in an order that makes SQLite move rows about."""
    order = list(range(count))
    random.Random(5).shuffle(order)
    for n in order:
        store.put(canonical(chunk(n)))
        behind = tuple(chunk((n * 7 + k) % count) for k in range(1, 1 + n % 4))
        store.put(patch(chunk(n), antecedents=behind))


def holding(root: Path, needles: dict[str, bytes]) -> list[tuple[str, str]]:
    return [(f, what) for f, data in snapshot(root).items() for what, n in needles.items() if n in data]


@pytest.mark.few(1)
@pytest.mark.parametrize("options", STORES.values(), ids=STORES)
def test_no_byte_of_a_forgotten_id_is_left_in_any_file(root: Path, options: dict[str, Any]) -> None:
    count, gone = 60, [chunk(n) for n in (3, 17, 41, 44, 59)]
    with ChunkStore.open(root, **options) as store:
        fill_many(store, count)
        codec = StoreAdmin(store).codec
        for one in gone:
            done = StoreAdmin(store).forget(one)
            assert done.removed and done.left == ()
        needles = {
            f"{one[:6]} {form}": data
            for one in gone
            for form, data in {
                "hex": one.encode(),
                "raw": bytes.fromhex(one),
                "veiled": codec.seal_id(one).encode(),
            }.items()
        }
        assert holding(root, needles) == []
        assert {i.chunk_id for i in store.ls()} == {chunk(n) for n in range(count)} - set(gone)
    assert holding(root, needles) == []


def test_a_start_of_none_or_of_several_forgets_nothing(root: Path) -> None:
    with ChunkStore.open(root) as store:
        for one in ("ab" + "0" * 62, "ab" + "1" * 62):
            store.put(canonical(one))
        with pytest.raises(AmbiguousId, match="'ab' names no one chunk: 2 begin so"):
            StoreAdmin(store).forget("ab")
        for start in ("abc", "", "ab" * 33):
            with pytest.raises(UnknownChunk, match="begins with"):
                StoreAdmin(store).forget(start)
        assert len(store.ls()) == 2
        assert StoreAdmin(store).forget("f" * 64).removed == ()
