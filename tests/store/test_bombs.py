"""Files that claim more than they hold, headers nobody signed, and links where a store keeps files."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import torch

from kamera.errors import CorruptChunk
from kamera.store import ChunkStore, StoreAdmin
from kamera.store import head as head_module
from kamera.store.entries import file_entries
from tests.store.builders import (
    CHUNK,
    CONTEXT,
    canonical,
    decode,
    encode,
    file_of,
    join,
    split,
)

SECRET, KEY = b"a secret of acme, 32 bytes long!", b"k" * 32
GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def bomb(root: Path, gib: int = 8) -> Path:
    """An object with a good digest whose tensors are ``gib`` GiB of nothing: a few KiB of disk."""
    record = canonical()
    outer, header, rest = split(encode(record, 7.0))
    end = len(rest) + gib * GIB
    outer["inputs/zz"] = {"dtype": "U8", "shape": [gib * GIB], "data_offsets": [len(rest), end]}
    header = header | {"inputs": [*header["inputs"], "zz"]}
    path = file_of(root, record.key)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(join(outer, header, rest))
    os.truncate(path, path.stat().st_size + gib * GIB)
    assert path.stat().st_blocks * 512 < 2**20
    return path


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that were asked for; a large one is refused, so that a red test does not eat the machine."""
    asked: list[int] = []
    real = os.read

    def read(descriptor: int, size: int) -> bytes:
        assert size < GIB, f"{size} bytes asked for"
        return real(descriptor, size)

    def allocate_bytes(size: int, pinned: bool = False) -> object:
        asked.append(size)
        raise AssertionError(f"{size} bytes asked for")

    monkeypatch.setattr(os, "read", read)
    monkeypatch.setattr("kamera.store.opened.allocate_bytes", allocate_bytes)
    return asked


def test_a_hollow_file_asks_for_no_memory(root: Path, bounded: list[int]) -> None:
    ChunkStore.open(root).close()
    path = bomb(root)
    with ChunkStore.open(root) as store:
        with pytest.raises(CorruptChunk, match="hollow"):
            store.get_canonical(CONTEXT, CHUNK)
        assert store.get_canonical(CONTEXT, CHUNK) is None and not path.exists()
        assert len(StoreAdmin(store).quarantine.copies()) == 1
    assert bounded == []


def test_nothing_is_parsed_before_its_digest_is_checked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(root) as store:
        key = store.put(canonical())
    path = file_of(root, key)
    data = bytearray(path.read_bytes())
    data[120] ^= 1
    path.write_bytes(data)
    parsed: list[str] = []
    real = json.loads
    monkeypatch.setattr(head_module.json, "loads", lambda text: parsed.append(text) or real(text))
    with ChunkStore.open(root) as store:
        assert StoreAdmin(store).rebuild_index() == 0
    assert not [text for text in parsed if "digests" in str(text)]


def test_a_header_that_claims_much_is_refused_before_anything_is_made_for_it() -> None:
    """Each size and digest of it fits the other: only the file is smaller."""
    made = canonical(inputs={"large": torch.empty(2**44, dtype=torch.int8, device="meta")})
    header = head_module.header_of(made, 1.0, {"algorithm": "sha256", "pieces": []})
    data = head_module.front_of(head_module.text_of(header, file_entries(made.tensors())), b"") + bytes(100)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptChunk):
            decode(data, made.key, "here")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
