"""One layer of a canonical, read without the rest and verified by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera.errors import CorruptChunk
from kamera.ops.quantize_kv import KV_CODECS
from kamera.store import ChunkStore, Context
from kamera.store.records import kept
from kamera.store.sources import FileSource
from lab.reliability.forge import front_of, group_of, split

from .builders import CHUNK, CONTEXT, bits, canonical, tensor

LAYERS = 6


def channels(i: int) -> dict[str, torch.Tensor]:
    return {n: tensor((2, 3, 400), torch.bfloat16, 2 * i + j) for j, n in enumerate("kv")}


RECORD = canonical(kv=(*map(channels, range(LAYERS - 1)), {}))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A store with one canonical."""
    with ChunkStore.open(tmp_path / "s") as store:
        store.put_canonical(RECORD)
    yield tmp_path / "s"


def file_of(path: Path) -> Path:
    [file] = path.rglob("objects/*/*.safetensors")
    return file


def damage(file: Path, place: int, mask: int = 1) -> None:
    """In place and at the same time: as a disk does it, nobody sees."""
    status = file.stat()
    with open(file, "r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ mask]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def same(layer: Any, index: int, record: Any = RECORD) -> bool:
    mine = record.kv[index]
    return layer.keys() == mine.keys() and all(
        t.dtype == mine[n].dtype and t.shape == mine[n].shape and bits(t) == bits(mine[n])
        for n, t in layer.items()
    )


@pytest.mark.parametrize("url", ["memory", "directory", "sealed", "encrypted"])
def test_a_layer_is_what_the_whole_has_there(url: str, tmp_path: Path) -> None:
    place = "memory://" if url == "memory" else tmp_path / "s"
    secret = "a secret of many bytes" if url in ("sealed", "encrypted") else None
    keys = [b"k" * 32] if url == "encrypted" else []
    with ChunkStore.open(place, memory_limit="1MiB", secret=secret, keys=keys) as store:
        assert store.read_layer(CONTEXT, CHUNK, 0) is None
        store.put_canonical(RECORD)
    with ChunkStore.open(place, memory_limit="1MiB", secret=secret, keys=keys) as store:
        if url == "memory":
            store.put_canonical(RECORD)
        for _ in range(2):
            assert all(same(store.read_layer(CONTEXT, CHUNK, i), i) for i in range(LAYERS))
        for index in (-1, LAYERS):
            with pytest.raises(ValueError, match=f"layer {index} of a canonical of {LAYERS} layers"):
                store.read_layer(CONTEXT, CHUNK, index)


@pytest.mark.parametrize("codec", KV_CODECS)
def test_a_layer_in_codes_is_read_by_itself_too(codec: str, tmp_path: Path) -> None:
    numbers = [torch.randn(2, 5, 70, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(6)]
    layers = [{"k": k, "v": v} for k, v in zip(numbers[::2], numbers[1::2], strict=True)]
    context: Context = replace(CONTEXT, kv=codec)
    record = kept(canonical(context=context, tokens=5, kv=tuple(layers)))
    with ChunkStore.open(tmp_path / "s", memory_limit=0) as store:
        store.put_canonical(record)
        file = file_of(tmp_path / "s")
        outer, _, _ = split(file.read_bytes())
        spoiled = front_of(file.read_bytes()) + outer["kv/00001/v/codes"]["data_offsets"][0]
        damage(file, spoiled)
        for index in (0, 2):
            assert same(store.read_layer(context, CHUNK, index), index, record)
        with pytest.raises(CorruptChunk, match=r"bytes of kv/00001 have changed.*moved to"):
            store.read_layer(context, CHUNK, 1)


def test_the_rest_of_the_file_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    into = FileSource.into

    def spy(self: FileSource, start: int, view: memoryview) -> None:
        read.append(len(view))
        into(self, start, view)

    monkeypatch.setattr(FileSource, "into", spy)
    with ChunkStore.open(path) as store:
        assert all(same(store.read_layer(CONTEXT, CHUNK, i), i) for i in range(LAYERS))
        assert store.stats().memory.objects == 0
    assert read == [2 * 2 * 3 * 400 * 2] * (LAYERS - 1)  # k and v of one layer, which lie together


def test_damage_in_another_layer_does_not_matter_and_in_this_one_is_refused(path: Path) -> None:
    damage(file_of(path), file_of(path).read_bytes().index(bytes(bits(RECORD.kv[3]["v"]))) + 7)
    with ChunkStore.open(path) as store:
        assert same(store.read_layer(CONTEXT, CHUNK, 2), 2)
        with pytest.raises(CorruptChunk, match="moved to"):
            store.read_layer(CONTEXT, CHUNK, 3)
        assert store.read_layer(CONTEXT, CHUNK, 2) is None


def test_every_byte_of_the_header_may_change_and_nothing_is_served(path: Path) -> None:
    file = file_of(path)
    data = file.read_bytes()
    with ChunkStore.open(path, memory_limit=0) as store:
        for place in range(0, front_of(data), 5):
            damage(file, place, 0x11)
            with pytest.raises(CorruptChunk):
                store.read_layer(CONTEXT, CHUNK, 1)
            file.write_bytes(data)
            store.drop_quarantined(RECORD.key)


def test_a_flip_in_any_group_is_refused_by_a_read_of_that_group_and_of_no_other(path: Path) -> None:
    file = file_of(path)
    data = file.read_bytes()
    outer, _, _ = split(data)
    for name, entry in outer.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        for place in (start, (start + end) // 2, end - 1):
            damage(file, front_of(data) + place, 0x80)
            with ChunkStore.open(path, memory_limit=0) as store:
                for index in range(LAYERS - 1):
                    if group_of(name) == f"kv/{index:05d}":
                        continue
                    assert same(store.read_layer(CONTEXT, CHUNK, index), index)
                with pytest.raises(CorruptChunk, match=f"bytes of {group_of(name)} have changed"):
                    if name.startswith("kv/"):
                        store.read_layer(CONTEXT, CHUNK, int(name.split("/")[1]))
                    else:
                        store.get_canonical(CONTEXT, CHUNK)
                store.drop_quarantined(RECORD.key)
            file.write_bytes(data)


@pytest.mark.parametrize("cut", [0, 4, 8, 50, 700, -1])
def test_a_file_cut_short_is_refused(path: Path, cut: int) -> None:
    file = file_of(path)
    file.write_bytes(file.read_bytes()[:cut])
    with ChunkStore.open(path) as store, pytest.raises(CorruptChunk):
        store.read_layer(CONTEXT, CHUNK, 4)


def test_a_file_cut_short_after_it_was_opened_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would kill the process if the file were mapped."""
    into = FileSource.into

    def overtaken(self: FileSource, start: int, view: memoryview) -> None:
        os.truncate(file_of(path), start + 10)
        monkeypatch.undo()
        into(self, start, view)

    with ChunkStore.open(path) as store:
        monkeypatch.setattr(FileSource, "into", overtaken)
        with pytest.raises(CorruptChunk, match="truncated"):
            store.read_layer(CONTEXT, CHUNK, 2)


def test_a_replaced_object_is_read_anew(path: Path) -> None:
    with ChunkStore.open(path) as store:
        assert store.read_layer(CONTEXT, CHUNK, 0) is not None
        assert store.delete(RECORD.key)
        assert store.read_layer(CONTEXT, CHUNK, 0) is None
        other = canonical(seed=5)
        store.put_canonical(other)
    with ChunkStore.open(path) as store:
        assert same(store.read_layer(CONTEXT, CHUNK, 0), 0, other)
