"""Encrypted objects: every group of tensors is a frame that is decrypted by itself, in its own place only."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera.errors import CorruptChunk
from kamera.store import ChunkStore
from kamera.store.seal import encryption as encryption_module
from kamera.store.seal.encryption import Encrypted
from kamera.store.sources import BytesSource
from tests.store.builders import CONTEXT, assert_same, canonical, patch, tensor

ACME = replace(CONTEXT, tenant="acme")
SECRET = b"a secret of acme, 32 bytes long!"
CODEC = Encrypted.under("acme", SECRET, [b"k" * 32])
LAYERS = 4
RECORD = canonical(
    context=ACME,
    kv=tuple({"k": tensor((2, 3, 50), torch.bfloat16, i)} for i in range(LAYERS)),
)
NAME = CODEC.name(RECORD.key)
PREAMBLE = 104


def frames_of(data: bytes) -> list[tuple[int, int]]:
    """Where the head's frame and those of the groups stand."""
    opened = CODEC.open(BytesSource(data), NAME, "here")
    assert opened is not None
    cuts = [PREAMBLE, PREAMBLE + int.from_bytes(data[56:64], "little")]
    for group in opened.head.groups.values():
        cuts.append(cuts[-1] + group.size + 16)
    assert cuts[-1] == len(data) == int.from_bytes(data[64:72], "little")
    return list(pairwise(cuts))


def read(data: bytes) -> Any:
    return CODEC.decode(data, NAME, "here")


def test_an_object_is_a_preamble_a_header_and_its_frames() -> None:
    data = CODEC.encode(RECORD, 1.0)
    assert data[:8] == b"KAMERA\x00\x02"
    assert len(frames_of(data)) == 1 + 1 + LAYERS  # the head; small tensors; layers
    assert_same(read(data), RECORD)


def test_swapped_dropped_cut_or_doubled_frames_are_refused() -> None:
    data = CODEC.encode(RECORD, 1.0)
    places = frames_of(data)
    equal = [(a, b) for a in places for b in places if a < b and a[1] - a[0] == b[1] - b[0]]
    assert len(equal) >= LAYERS * (LAYERS - 1) // 2
    for (a, b), (c, d) in equal:
        with pytest.raises(CorruptChunk, match="cannot be decrypted"):
            read(data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:])
    for a, b in places[1:]:
        for wrong in (data[:a] + data[b:], data[:a], data[:b] + data[a:b] + data[b:], data + data[a:b]):
            if wrong != data:
                with pytest.raises(CorruptChunk):
                    read(wrong)
        shorter = data[: b - 1] + data[b:] + b"\0"  # as long as it was
        with pytest.raises(CorruptChunk, match="cannot be decrypted"):
            read(shorter)


def test_a_frame_of_another_write_or_another_object_does_not_fit() -> None:
    one, two = CODEC.encode(RECORD, 1.0), CODEC.encode(RECORD, 1.0)
    places = frames_of(one)
    assert one != two and places == frames_of(two)  # a fresh salt each time
    for index, (a, b) in enumerate(places):
        assert one[a:b] != two[a:b]
        with pytest.raises(CorruptChunk, match="head cannot" if index == 0 else "cannot be decrypted"):
            read(one[:a] + two[a:b] + one[b:])
    other = replace(RECORD, chunk_id="d" * 64)
    with pytest.raises(CorruptChunk, match="first bytes"):
        CODEC.decode(one, CODEC.name(other.key), "here")


def test_a_damaged_layer_is_refused_by_its_name(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tenant": "acme", "secret": SECRET, "keys": [b"k" * 32], "memory_limit": 0}
    with ChunkStore.open(tmp_path / "s", **options) as store:
        store.put(RECORD)
        [file] = tmp_path.rglob("objects/*/*.safetensors")
        data = file.read_bytes()
        groups = list(CODEC.open(BytesSource(data), NAME, "here").head.groups)
        start, _ = frames_of(data)[1 + groups.index("kv/00002")]
        file.write_bytes(data[: start + 5] + bytes([data[start + 5] ^ 1]) + data[start + 6 :])
        with pytest.raises(CorruptChunk, match=r"kv/00002 cannot be decrypted.*moved to"):
            store.get_canonical(ACME, RECORD.chunk_id)
        assert store.get_canonical(ACME, RECORD.chunk_id) is None


def test_what_holds_a_group_too_large_for_one_frame_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption_module, "LIMIT", 100)
    with pytest.raises(ValueError, match="too large to be encrypted"):
        CODEC.encode(patch(context=ACME), 1.0)
