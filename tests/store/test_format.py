"""What an object's file is, and that a record comes back from it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings

from kamera.errors import CorruptChunk, StoreVersionError
from kamera.store import entries
from kamera.store.codec import Codec
from kamera.store.sources import BytesSource
from tests.store.builders import (
    assert_same,
    canonical,
    coded_patch,
    decode,
    encode,
    join,
    records,
    seal,
    split,
)

HERE = "objects/aa/file"


def read(data: bytes, key: str) -> Any:
    return decode(data, key, HERE)


@settings(deadline=None, max_examples=100)
@given(records)
def test_a_record_comes_back_bit_for_bit(record: Any) -> None:
    data = encode(record, 1.5)
    assert_same(read(data, record.key), record)
    info = Codec().describe(record, 1.5, len(data))
    assert Codec().read_info(BytesSource(data), record.key, HERE) == info
    assert info.tokens == record.tokens and info.key == record.key


@settings(deadline=None, max_examples=30)
@given(records)
def test_the_same_record_gives_the_same_bytes(record: Any) -> None:
    assert encode(record, 7) == encode(record, 7)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_patch_in_codes_comes_back_and_says_so_in_its_header(bits: int, rank: int) -> None:
    record = coded_patch(bits, rank)
    data = encode(record, 7)
    _, header, _ = split(data)
    assert header["format"] == 5
    assert header["factors"][1]["v"] == ["left_codes", "left_scales", "right"]
    assert header["rank"] == max(rank, 2)
    back = read(data, record.key)
    assert_same(back, record)
    assert back.nbytes == record.patch.nbytes == sum(t.nbytes for t in record.tensors().values())
    for name, factors in record.patch.layers[1].items():
        mine, theirs = factors.dense(), back.patch.layers[1][name].dense()
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_any_safetensors_reader_reads_the_file(tmp_path: Path) -> None:
    record = canonical()
    path = tmp_path / "object.safetensors"
    path.write_bytes(encode(record, 7))
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(record.tensors())
        for name, mine in record.tensors().items():
            assert torch.equal(file.get_tensor(name).view(torch.uint8), mine.contiguous().view(torch.uint8))
        assert json.loads(file.metadata()["kamera"])["chunk_id"] == record.chunk_id


def test_the_digest_is_where_the_specification_puts_it() -> None:
    data = encode(canonical(), 7)
    assert seal(data) == data
    assert data[8:35] == b'{"__metadata__":{"header":"'
    _, header, rest = split(data)
    assert header["digests"] == {"algorithm": "sha256", "pieces": [hashlib.sha256(rest).hexdigest()]}


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
def test_each_piece_has_a_digest(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "PIECE", size)
    for record in (canonical(), coded_patch()):
        data = encode(record, 7)
        _, header, rest = split(data)
        pieces = [rest[start : start + size] for start in range(0, len(rest), size)]
        assert header["digests"]["pieces"] == [hashlib.sha256(piece).hexdigest() for piece in pieces]
        assert_same(read(data, record.key), record)
        for i in range(0, len(pieces), 5):
            bad = bytearray(data)
            bad[len(data) - len(rest) + i * size] ^= 1
            with pytest.raises(CorruptChunk, match=f"bytes {i * size} to .* of its tensors have changed"):
                read(bytes(bad), record.key)


@pytest.mark.parametrize("version", [1, 2, 3, 4, 6])
def test_an_intact_object_of_another_format_names_both(version: int) -> None:
    outer, header, rest = split(encode(canonical(), 7))
    data = join(outer, header | {"format": version, "layers": {"some": "thing new"}}, rest)
    with pytest.raises(StoreVersionError, match=rf"format {version}.*reads 5 alone"):
        read(data, canonical().key)
    damaged = bytearray(data)
    damaged[200] ^= 1
    with pytest.raises(CorruptChunk):
        read(bytes(damaged), canonical().key)


@pytest.mark.parametrize(
    "fields",
    [
        {"info": {"x": float("nan")}},
        {"info": {"x": object()}},
        {"info": {"x": b"bytes"}},
        {"inputs": {"x": torch.zeros(2, dtype=torch.complex64)}},
        {"inputs": {"\ud800": torch.zeros(2)}},
    ],
)
def test_what_the_format_cannot_hold_is_the_callers_mistake(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        encode(canonical(**fields), 7)
