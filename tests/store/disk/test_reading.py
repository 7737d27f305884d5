"""A canonical read from a directory, its pieces side by side on threads, each verified by itself."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.reliability.forge import front_of, split
from kamera.errors import CorruptChunk
from kamera.store import ChunkStore, StoreAdmin, entries
from kamera.store.opened import OpenObject
from tests.store.builders import CHUNK, CONTEXT, assert_same, canonical, tensor

LAYERS = 6


def channels(i: int) -> dict[str, torch.Tensor]:
    """Heads of three sizes, so that there are three blocks of two channels."""
    return {n: tensor((2, 3, 200 + 100 * (i % 3)), torch.bfloat16, 2 * i + j) for j, n in enumerate("kv")}


RECORD = canonical(kv=(*map(channels, range(LAYERS - 1)), {}))


@pytest.fixture(autouse=True, params=["inline", "threads"])
def threads(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "threads":
        monkeypatch.setattr(entries, "PIECE", 1500)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with one canonical."""
    with ChunkStore.open(tmp_path / "s") as store:
        store.put(RECORD)
    return tmp_path / "s"


def file_of(path: Path) -> Path:
    [file] = path.rglob("objects/*.safetensors")
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


def test_a_flip_in_any_tensor_is_refused_by_its_place(path: Path) -> None:
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
                with pytest.raises(CorruptChunk, match=r"bytes \d+ to \d+ of.*changed.*moved to") as caught:
                    store.get_canonical(CONTEXT, CHUNK)
                first, last = map(int, re.findall(r"bytes (\d+) to (\d+)", str(caught.value))[0])
                assert first <= place < last and last - first <= entries.PIECE
                assert store.get_canonical(CONTEXT, CHUNK) is None
                StoreAdmin(store).quarantine.drop(RECORD.key)
            file.write_bytes(data)


def test_a_file_replaced_while_it_is_read_serves_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = canonical(kv=RECORD.kv, seed=9)
    fill, done = OpenObject.fill, []

    def overtaken(self: OpenObject, piece: int) -> None:
        if not done:
            done.append(piece)
            with ChunkStore.open(path) as writer:
                StoreAdmin(writer).delete(RECORD.key)
                writer.put(other)
        fill(self, piece)

    monkeypatch.setattr(OpenObject, "fill", overtaken)
    with ChunkStore.open(path) as store:
        found = store.get_canonical(CONTEXT, CHUNK)
        assert found is not None
        assert_same(found, RECORD)
        again = store.get_canonical(CONTEXT, CHUNK)
        assert again is not None
        assert_same(again, other)
