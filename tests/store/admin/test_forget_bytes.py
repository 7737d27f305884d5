"""After `forget` no byte of the id is below the store's folder, and only what was named is forgotten."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import AmbiguousId, UnknownChunk
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.codec import Codec
from tests.store.builders import canonical, patch, snapshot

SECRET, KEY = b"a secret of acme, 32 bytes long!", b"k" * 32
STORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sealed": {"secret": SECRET},
    "encrypted": {"secret": SECRET, "keys": [KEY]},
}


def chunk(n: int) -> str:
    return hashlib.sha256(str(n).encode()).hexdigest()


def fill(store: ChunkStore, count: int) -> None:
    """So many chunks with one patch each behind others, in an order that makes SQLite move rows about."""
    order = list(range(count))
    random.Random(5).shuffle(order)
    for n in order:
        store.put(canonical(chunk(n)))
        behind = tuple(chunk((n * 7 + k) % count) for k in range(1, 1 + n % 4))
        store.put(patch(chunk(n), antecedents=behind))


def holding(root: Path, needles: dict[str, bytes]) -> list[tuple[str, str]]:
    return [(f, what) for f, data in snapshot(root).items() for what, n in needles.items() if n in data]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("options", STORES.values(), ids=STORES)
def test_no_byte_of_a_forgotten_id_is_left_in_any_file(root: Path, options: dict[str, Any]) -> None:
    count, gone = 60, [chunk(n) for n in (3, 17, 41, 44, 59)]
    with ChunkStore.open(root, **options) as store:
        fill(store, count)
        codec: Codec = StoreAdmin(store).objects.codec
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
