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
from kamera.store import ChunkStore
from kamera.store.seal import frames as frames_module
from kamera.store.seal.encryption import Encrypted
from tests.store.builders import CONTEXT, canonical, tensor

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
    """Where the frames are, after docs/stores.md."""

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
