"""Encrypted objects: every frame of the plain one is decrypted by itself, in its own place only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera.errors import CorruptChunk
from kamera.ops import Blocks, LowRanks, Patch
from kamera.store import ChunkStore, entries
from kamera.store.seal import frames as frames_module
from kamera.store.seal.codec import Sealed
from kamera.store.seal.encryption import Encrypted
from kamera.store.seal.frames import Cipher
from kamera.store.sources import BytesSource
from tests.store.builders import CONTEXT, assert_same, canonical, patch, tensor

ACME = replace(CONTEXT, tenant="acme")
SECRET = b"a secret of acme, 32 bytes long!"
CODEC = Encrypted.under("acme", SECRET, [b"k" * 32])
RECORD = canonical(context=ACME, kv=tuple({f"k{i}": tensor((2, 3, 50), torch.bfloat16, i)} for i in range(4)))
NAME = CODEC.name(RECORD.key)
PREAMBLE = 104


@pytest.fixture(autouse=True, params=[100, 250, 300, 600, 256 * 2**10])
def size(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Frames small enough for an object to have several, and as they are."""
    monkeypatch.setattr(frames_module, "FRAME", request.param)
    return int(request.param)


def frames_of(data: bytes, frame: int) -> list[tuple[int, int]]:
    """Where the frames are, after docs/store-format.md."""

    def ends() -> Iterator[int]:
        head, whole = (int.from_bytes(data[i : i + 8], "little") for i in (56, 64))
        at = PREAMBLE
        yield at
        for length in [head, *(min(frame, whole - x) for x in range(head, whole, frame))]:
            at += length + 16
            yield at
        assert at == len(data)

    return list(pairwise(ends()))


def read(data: bytes) -> Any:
    return CODEC.decode(data, NAME, "here")


def test_an_object_is_a_preamble_and_the_frames_of_the_sealed_one(size: int) -> None:
    data = CODEC.encode(RECORD, 1.0)
    assert data[:8] == b"KAMERA\x00\x03"
    plain = Sealed.of("acme", SECRET).encode(RECORD, 1.0)
    head = 8 + int.from_bytes(plain[:8], "little")
    assert [int.from_bytes(data[i : i + 8], "little") for i in (56, 64)] == [head, len(plain)]
    assert len(frames_of(data, size)) == 1 + -(-(len(plain) - head) // size)
    assert_same(read(data), RECORD)
    whole = CODEC._plain(BytesSource(data), NAME, "here")
    assert whole.read(0, len(plain) + 9) == plain and whole.read(len(plain), 5) == b""
    for start in range(0, len(plain), 97):
        for length in (0, 1, 250, 600, 1500):
            assert whole.read(start, length) == plain[start : start + length]
    with pytest.raises(EOFError):
        whole.read_into(len(plain) - 3, memoryview(bytearray(4)))


def test_swapped_dropped_cut_or_doubled_frames_are_refused(size: int) -> None:
    data = CODEC.encode(RECORD, 1.0)
    places = frames_of(data, size)
    equal = [(a, b) for a in places for b in places if a < b and a[1] - a[0] == b[1] - b[0]]
    assert equal or len(places) == 2
    for (a, b), (c, d) in equal:
        with pytest.raises(CorruptChunk, match="cannot be decrypted"):
            read(data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:])
    for a, b in places:
        for wrong in (data[:a] + data[b:], data[:a], data[:b] + data[a:b] + data[b:], data + data[a:b]):
            if wrong != data:
                with pytest.raises(CorruptChunk):
                    read(wrong)
        shorter = data[: b - 1] + data[b:] + bytes([data[-1] ^ 1])  # as long as it was
        with pytest.raises(CorruptChunk, match="cannot be decrypted"):
            read(shorter)


def test_a_frame_of_another_write_or_another_object_does_not_fit(size: int) -> None:
    one, two = CODEC.encode(RECORD, 1.0), CODEC.encode(RECORD, 1.0)
    places = frames_of(one, size)
    assert one != two and places == frames_of(two, size)  # a fresh salt each time
    for index, (a, b) in enumerate(places):
        assert one[a:b] != two[a:b]
        with pytest.raises(CorruptChunk, match=f"frame {index} cannot be decrypted"):
            read(one[:a] + two[a:b] + one[b:])
    other = replace(RECORD, chunk_id="d" * 64)
    with pytest.raises(CorruptChunk, match="first bytes"):
        CODEC.decode(one, CODEC.name(other.key), "here")


def test_a_damaged_frame_is_refused_by_its_number(tmp_path: Path, size: int) -> None:
    options: dict[str, Any] = {"tenant": "acme", "secret": SECRET, "keys": [b"k" * 32], "memory_limit": 0}
    with ChunkStore.open(tmp_path / "s", **options) as store:
        store.put(RECORD)
        [file] = tmp_path.rglob("objects/*.safetensors")
        data = file.read_bytes()
        places = frames_of(data, size)
        start, _ = places[-1]
        file.write_bytes(data[: start + 5] + bytes([data[start + 5] ^ 1]) + data[start + 6 :])
        with pytest.raises(CorruptChunk, match=rf"frame {len(places) - 1} cannot be decrypted.*moved to"):
            store.get_canonical(ACME, RECORD.chunk_id)
        assert store.get_canonical(ACME, RECORD.chunk_id) is None


@pytest.mark.parametrize("piece", [100, 333, 8 * 2**20])
def test_a_number_is_used_once_and_pieces_need_not_fit_frames(
    monkeypatch: pytest.MonkeyPatch, size: int, piece: int
) -> None:
    monkeypatch.setattr(entries, "PIECE", piece)
    numbers, encrypt = list[int](), Cipher.encrypt

    def numbered(self: Cipher, index: int, data: bytes) -> bytes:
        numbers.append(index)
        return encrypt(self, index, data)

    monkeypatch.setattr(Cipher, "encrypt", numbered)
    wide = LowRanks(tensor((3, 2), torch.float32), tensor((101, 2), torch.float16, 1), (2,))
    two = replace(patch(context=ACME), patch=Patch(Blocks([{"k": wide, "v": wide}], ((0,),))))
    for record in (RECORD, two):
        numbers.clear()
        data = CODEC.encode(record, 1.0)
        assert_same(CODEC.decode(data, CODEC.name(record.key), "here"), record)
        assert numbers == list(range(len(frames_of(data, size))))  # a nonce: none may be used twice
