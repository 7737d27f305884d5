"""One layer of a canonical, read without the rest and verified."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kamera.errors import CorruptChunk
from kamera.store import ChunkStore
from kamera.store.disk.tier import DiskTier

from .builders import CONTEXT, bits, canonical, tensor

CHUNK = "c" * 64
LAYERS = 6


def channels(i: int) -> dict[str, torch.Tensor]:
    return {n: tensor((2, 3, 400), torch.bfloat16, 2 * i + j) for j, n in enumerate("kv")}


RECORD = canonical(kv=(*map(channels, range(LAYERS - 1)), {}))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A store with one canonical, read once for a layer."""
    with ChunkStore.open(tmp_path / "s") as store:
        store.put_canonical(RECORD)
    with ChunkStore.open(tmp_path / "s") as store:
        assert store.read_layer(CONTEXT, CHUNK, 0) is not None
    yield tmp_path / "s"


def file_of(path: Path) -> Path:
    return path / "objects" / RECORD.key[:2] / f"{RECORD.key}.safetensors"


def same(layer: object, index: int) -> bool:
    assert isinstance(layer, dict)
    mine = RECORD.kv[index]
    return layer.keys() == mine.keys() and all(
        t.dtype == mine[n].dtype and t.shape == mine[n].shape and bits(t) == bits(mine[n])
        for n, t in layer.items()
    )


@pytest.mark.parametrize("url", ["memory", "directory", "sealed"])
def test_a_layer_is_what_the_whole_has_there(url: str, tmp_path: Path) -> None:
    place = "memory://" if url == "memory" else tmp_path / "s"
    secret = "a secret of many bytes" if url == "sealed" else None
    with ChunkStore.open(place, memory_limit="1MiB", secret=secret) as store:
        assert store.read_layer(CONTEXT, CHUNK, 0) is None
        store.put_canonical(RECORD)
        for _ in range(2):
            assert all(same(store.read_layer(CONTEXT, CHUNK, i), i) for i in range(LAYERS))
        for index in (-1, LAYERS):
            with pytest.raises(ValueError, match=f"layer {index} of a canonical of {LAYERS} layers"):
                store.read_layer(CONTEXT, CHUNK, index)


def test_the_rest_of_the_file_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(*_: object) -> None:
        raise AssertionError("the whole file was read")

    with ChunkStore.open(path) as store:
        monkeypatch.setattr(DiskTier, "load", whole)
        assert all(same(store.read_layer(CONTEXT, CHUNK, i), i) for i in range(LAYERS))
        assert store.stats().memory.objects == 0


def test_damage_in_another_layer_does_not_matter_and_in_this_one_is_refused(path: Path) -> None:
    file = file_of(path)
    data = bytearray(file.read_bytes())
    place = bytes(data).index(bytes(bits(RECORD.kv[3]["v"])))
    status = file.stat()
    data[place + 7] ^= 1
    with open(file, "r+b") as opened:  # in place: as a disk does it, nobody sees
        opened.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with ChunkStore.open(path) as store:
        assert same(store.read_layer(CONTEXT, CHUNK, 2), 2)
        with pytest.raises(CorruptChunk, match="moved to"):
            store.read_layer(CONTEXT, CHUNK, 3)
        assert store.read_layer(CONTEXT, CHUNK, 2) is None


def test_every_byte_of_the_header_may_change_and_nothing_wrong_is_served(path: Path) -> None:
    file = file_of(path)
    data = file.read_bytes()
    status = file.stat()
    size = 8 + int.from_bytes(data[:8], "little")
    served = refused = 0
    with ChunkStore.open(path, memory_limit=0) as store:
        for place in range(0, size, 5):
            changed = bytearray(data)
            changed[place] ^= 0x11
            with open(file, "r+b") as opened:
                opened.write(changed)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            layer = store._tiers._layers.read(RECORD.key, 1)  # type: ignore[union-attr]
            served += layer is not None
            refused += layer is None
            assert layer is None or same(layer, 1)
    assert served and refused


@pytest.mark.parametrize("cut", [0, 4, 8, 50, 700, -1])
def test_a_file_cut_short_is_refused(path: Path, cut: int) -> None:
    file = file_of(path)
    file.write_bytes(file.read_bytes()[:cut])
    with ChunkStore.open(path) as store, pytest.raises(CorruptChunk):
        store.read_layer(CONTEXT, CHUNK, 4)


def test_a_replaced_object_is_read_anew(path: Path) -> None:
    with ChunkStore.open(path) as store:
        assert store.delete(RECORD.key)
        assert store.read_layer(CONTEXT, CHUNK, 0) is None
        other = canonical(seed=5)
        store.put_canonical(other)
    with ChunkStore.open(path) as store:
        layer = store.read_layer(CONTEXT, CHUNK, 0)
        assert layer is not None and bits(layer["k"]) == bits(other.kv[0]["k"])


def test_what_was_noted_in_the_wrong_way_serves_nothing(path: Path) -> None:
    database = sqlite3.connect(path / "layers.sqlite")
    database.execute("UPDATE layers SET digest = (SELECT digest FROM layers WHERE layer = 2) WHERE layer = 1")
    database.commit()
    database.close()
    with ChunkStore.open(path) as store:
        assert store._tiers._layers.read(RECORD.key, 1) is None  # type: ignore[union-attr]
        assert same(store.read_layer(CONTEXT, CHUNK, 1), 1)
