"""An object's file: a record comes back from it bit for bit, and anything else is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128

from kamera.errors import CorruptChunk, StoreVersionError
from kamera.store import ChunkStore, StoreAdmin, format
from kamera.store.format import Codec, Source
from tests.store.builders import (
    CHUNK,
    CONTEXT,
    assert_same,
    canonical,
    coded_patch,
    decode,
    encode,
    file_of,
    flip,
    join,
    patch,
    records,
    seal,
    split,
)

HERE = "objects/aa/file"
GIB = 2**30


def read(data: bytes, key: str) -> Any:
    return decode(data, key, HERE)


# -- what it is ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(records)
def test_a_record_comes_back_bit_for_bit(record: Any) -> None:
    data = encode(record, 1.5)
    assert encode(record, 1.5) == data
    assert_same(read(data, record.key), record)
    info = Codec().describe(record, 1.5, len(data))
    assert Codec().read_info(Source.of(data), record.key, HERE) == info
    assert info.tokens == record.tokens and info.key == record.key


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_patch_in_codes_comes_back_and_says_so_in_its_header(bits: int, rank: int) -> None:
    record = coded_patch(bits, rank)
    data = encode(record, 7)
    _, header, _ = split(data)
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


@pytest.mark.few(9)
@pytest.mark.parametrize("algorithm", ["sha256", "blake3", "xxh3-128"])
@pytest.mark.parametrize("size", [1, 7, 50, 10_000, 8 * 2**20])
def test_the_digests_are_those_of_the_specification(
    size: int, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format, "PIECE", size)
    monkeypatch.setattr(format, "HASH", algorithm)
    hashed = {"sha256": hashlib.sha256, "blake3": blake3, "xxh3-128": xxh3_128}[algorithm]
    for record in (canonical(), coded_patch()):
        data = encode(record, 7)
        if size == 8 * 2**20:
            assert seal(data) == data and data[8:35] == b'{"__metadata__":{"header":"'
        _, header, rest = split(data)
        pieces = [rest[start : start + size] for start in range(0, len(rest), size)]
        digests = [hashed(piece).hexdigest() for piece in pieces]
        assert header["digests"] == {"algorithm": algorithm, "pieces": digests}
        assert_same(read(data, record.key), record)
        for i in range(0, len(pieces), 5):
            bad = bytearray(data)
            bad[len(data) - len(rest) + i * size] ^= 1
            with pytest.raises(CorruptChunk, match=f"bytes {i * size} to .* of its tensors have changed"):
                read(bytes(bad), record.key)


@pytest.mark.parametrize("version", [1, 5, 7])
def test_an_intact_object_of_another_format_names_both(version: int) -> None:
    outer, header, rest = split(encode(canonical(), 7))
    data = join(outer, header | {"format": version, "layers": {"some": "thing new"}}, rest)
    with pytest.raises(StoreVersionError, match=rf"format {version}.*reads 6 alone"):
        read(data, canonical().key)
    damaged = bytearray(data)
    damaged[200] ^= 1
    with pytest.raises(CorruptChunk):
        read(bytes(damaged), canonical().key)


def test_a_hash_that_is_not_installed_is_named_and_the_object_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "HASH", "blake3")
    data = encode(canonical(), 7)
    monkeypatch.setattr(format, "find_spec", lambda name: None)
    with pytest.raises(StoreVersionError, match=r"'blake3': pip install"):
        read(data, canonical().key)


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


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("record", [canonical(), patch(), patch(kind="orbit")])
def test_every_single_flipped_byte_is_refused(record: Any) -> None:
    data = encode(record, 7)
    for position in range(len(data)):
        for mask in (0x01, 0x80, 0x20):
            bad = bytearray(data)
            bad[position] ^= mask
            with pytest.raises(CorruptChunk):
                read(bytes(bad), record.key)


def test_every_truncation_and_extension_is_refused() -> None:
    record = patch()
    data = encode(record, 7)
    for length in range(len(data)):
        with pytest.raises(CorruptChunk, match=HERE):
            read(data[:length], record.key)
    for more in (b"\0", b" " * 8, data):
        with pytest.raises(CorruptChunk):
            read(data + more, record.key)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_overwritten_spans_are_refused(draw: st.DataObject) -> None:
    data = encode(canonical(), 7)
    start = draw.draw(st.integers(0, len(data) - 1))
    span = draw.draw(st.binary(min_size=1, max_size=40))
    bad = data[:start] + span + data[start + len(span) :]
    if bad != data:
        with pytest.raises(CorruptChunk):
            read(bad, canonical().key)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_forged_file_with_a_good_digest_is_refused_or_read(draw: st.DataObject) -> None:
    """Whatever the header says, decoding ends in a record or a named refusal."""
    telling = st.sampled_from(b'0123456789{}[]",:\\ aku-.eEtfn')
    record = draw.draw(st.sampled_from([canonical(), patch()]))
    data = bytearray(encode(record, 7))
    size = int.from_bytes(data[:8], "little")
    for _ in range(draw.draw(st.integers(1, 4))):
        position = draw.draw(st.integers(99, 8 + size - 1))
        data[position] = draw.draw(telling | st.integers(0, 255))
    try:
        back = read(seal(bytes(data)), record.key)
    except (CorruptChunk, StoreVersionError):
        return
    assert back.key == record.key


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(noise: bytes) -> None:
    sealed = seal((200).to_bytes(8, "little") + b'{"__metadata__":{"header":"' + b"0" * 64 + noise)
    for data in (noise, sealed):
        with pytest.raises(CorruptChunk):
            read(data, "0" * 64)


BROKEN = {
    "empty file": b"",
    "huge header length": (2**63).to_bytes(8, "little") + encode(canonical(), 7)[8:],
    "header length past the end": (10**6).to_bytes(8, "little") + encode(canonical(), 7)[8:],
    "zero header length": bytes(8) + encode(canonical(), 7)[8:],
    "a plain safetensors file": safetensors.torch.save({"x": torch.zeros(200)}),
    "a pickle": b"\x80\x04\x95" + bytes(200),
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptChunk, match=HERE):
        read(data, canonical().key)
    with pytest.raises(CorruptChunk, match=HERE):
        Codec().read_info(Source.of(data), canonical().key, HERE)


# -- bombs -----------------------------------------------------------------------------------------


def test_a_file_of_nothing_asks_for_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object with a good digest whose tensors are 8 GiB of holes: a few KiB of disk."""

    def allocate_bytes(size: int) -> object:
        raise AssertionError(f"{size} bytes asked for")

    monkeypatch.setattr(format, "allocate_bytes", allocate_bytes)
    with ChunkStore.open(tmp_path) as store:
        record = canonical()
        outer, header, rest = split(encode(record, 7.0))
        end = len(rest) + 8 * GIB
        outer["inputs/zz"] = {"dtype": "U8", "shape": [8 * GIB], "data_offsets": [len(rest), end]}
        path = file_of(tmp_path, record.key)
        path.write_bytes(join(outer, header | {"inputs": [*header["inputs"], "zz"]}, rest))
        os.truncate(path, path.stat().st_size + 8 * GIB)
        with pytest.raises(CorruptChunk, match="digests of"):
            store.get_canonical(CONTEXT, CHUNK)
        assert store.get_canonical(CONTEXT, CHUNK) is None and not path.exists()
        assert len(StoreAdmin(store).quarantined()) == 1


def test_nothing_is_parsed_before_its_digest_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(tmp_path) as store:
        key = store.put(canonical())
    flip(file_of(tmp_path, key), 120)
    parsed: list[str] = []
    real = json.loads
    monkeypatch.setattr(format.json, "loads", lambda text: parsed.append(text) or real(text))
    with ChunkStore.open(tmp_path) as store:
        assert StoreAdmin(store).rebuild_index() == 0
    assert not [text for text in parsed if "digests" in str(text)]


def test_a_header_that_claims_much_is_refused_before_anything_is_made_for_it() -> None:
    """Each size and digest of it fits the other: only the file is smaller."""
    outer, header, rest = split(encode(canonical(), 7.0))
    outer["inputs/zz"] = {"dtype": "U8", "shape": [2**44], "data_offsets": [len(rest), len(rest) + 2**44]}
    data = join(outer, header | {"inputs": [*header["inputs"], "zz"]}, rest)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptChunk):
            read(data, canonical().key)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
