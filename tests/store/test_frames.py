"""Encrypted objects: every group of tensors is a frame that is decrypted by itself, in its own place only."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera.errors import CorruptChunk
from kamera.ops import Blocks, LowRanks, Patch
from kamera.store import ChunkStore
from kamera.store.seal import frames as frames_module
from kamera.store.seal.encryption import Encrypted
from kamera.store.seal.frames import Cipher
from kamera.store.sources import BytesSource
from tests.store.builders import CONTEXT, assert_same, canonical, patch, tensor

ACME = replace(CONTEXT, tenant="acme")
SECRET = b"a secret of acme, 32 bytes long!"
CODEC = Encrypted.under("acme", SECRET, [b"k" * 32])
LAYERS = 4
RECORD = canonical(
    context=ACME,
    kv=tuple({f"k{i}": tensor((2, 3, 50), torch.bfloat16, i)} for i in range(LAYERS)),
)
NAME = CODEC.name(RECORD.key)
PREAMBLE = 104


def frames_of(data: bytes, name: str = NAME) -> list[tuple[int, int]]:
    """Where the head's frame and those of the groups stand."""
    opened = CODEC.open(BytesSource(data), name, "here")
    cuts = [PREAMBLE, PREAMBLE + int.from_bytes(data[56:64], "little")]
    for group in opened.head.groups.values():
        whole, rest = divmod(group.size, frames_module.LARGEST)
        for size in [frames_module.LARGEST] * whole + [rest] * (rest > 0):
            cuts.append(cuts[-1] + size + 16)
    assert cuts[-1] == len(data) == int.from_bytes(data[64:72], "little")
    return list(pairwise(cuts))


def read(data: bytes) -> Any:
    return CODEC.decode(data, NAME, "here")


def test_an_object_is_a_preamble_a_header_and_its_frames() -> None:
    data = CODEC.encode(RECORD, 1.0)
    assert data[:8] == b"KAMERA\x00\x02"
    assert len(frames_of(data)) == 1 + 1 + LAYERS  # the head; small tensors; blocks
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
        shorter = data[: b - 1] + data[b:] + bytes([data[-1] ^ 1])  # as long as it was
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


def test_a_damaged_block_is_refused_by_its_name(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tenant": "acme", "secret": SECRET, "keys": [b"k" * 32], "memory_limit": 0}
    with ChunkStore.open(tmp_path / "s", **options) as store:
        store.put(RECORD)
        [file] = tmp_path.rglob("objects/*.safetensors")
        data = file.read_bytes()
        groups = list(CODEC.open(BytesSource(data), NAME, "here").head.groups)
        start, _ = frames_of(data)[1 + groups.index("kv/2/k2")]
        file.write_bytes(data[: start + 5] + bytes([data[start + 5] ^ 1]) + data[start + 6 :])
        with pytest.raises(CorruptChunk, match=r"kv/2/k2 cannot be decrypted.*moved to"):
            store.get_canonical(ACME, RECORD.chunk_id)
        assert store.get_canonical(ACME, RECORD.chunk_id) is None


@pytest.mark.parametrize("largest", [600, 599, 300, 250, 101])
def test_a_long_group_is_several_frames_each_in_its_place(
    monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    """Of a patch, whose group has two dtypes and so two ranges of bytes, as of a canonical's 600 bytes."""
    monkeypatch.setattr(frames_module, "LARGEST", largest)
    numbers, encrypt = list[int](), Cipher.encrypt

    def numbered(self: Cipher, index: int, data: bytes) -> bytes:
        numbers.append(index)
        return encrypt(self, index, data)

    monkeypatch.setattr(Cipher, "encrypt", numbered)
    wide = LowRanks(tensor((3, 2), torch.float32), tensor((101, 2), torch.float16, 1), (2,))
    two = replace(patch(context=ACME), patch=Patch(Blocks([{"k": wide, "v": wide}], ((0,),))))
    for record in (RECORD, two):
        name = CODEC.name(record.key)
        numbers.clear()
        data = CODEC.encode(record, 1.0)
        assert_same(CODEC.decode(data, name, "here"), record)
        places = frames_of(data, name)
        groups = CODEC.open(BytesSource(data), name, "here").head.groups.values()
        assert len(places) == 1 + sum(-(-group.size // largest) for group in groups)
        assert numbers == list(range(len(places)))  # a number is a nonce: none may be used twice
        for (a, b), (c, d) in pairwise(places[1:]):
            swapped = data[:a] + data[c:d] + data[a:b] + data[d:]
            for wrong in (swapped, data[:a] + data[b:], data[: b - 1] + data[b:] + b"\0"):
                with pytest.raises(CorruptChunk):
                    CODEC.decode(wrong, name, "here")
