"""Bytes that are no object, or no longer one: all of them are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.errors import CorruptChunk, StoreVersionError
from kamera.store.codec import Codec
from kamera.store.sources import BytesSource
from tests.store.builders import canonical, decode, encode, patch, seal

HERE = "objects/aa/file"
REFUSALS = (CorruptChunk, StoreVersionError)


def read(data: bytes, key: str) -> Any:
    return decode(data, key, HERE)


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
def test_swapped_and_overwritten_spans_are_refused(draw: st.DataObject) -> None:
    record = canonical()
    data = encode(record, 7)
    start = draw.draw(st.integers(0, len(data) - 1))
    span = draw.draw(st.binary(min_size=1, max_size=40))
    bad = data[:start] + span + data[start + len(span) :]
    if bad == data:
        return
    with pytest.raises(CorruptChunk):
        read(bad, record.key)


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
    except REFUSALS:
        return
    assert back.key == record.key


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(noise: bytes) -> None:
    sealed = seal((200).to_bytes(8, "little") + b'{"__metadata__":{"header":"' + b"0" * 64 + noise)
    for data in (noise, sealed):
        with pytest.raises(CorruptChunk):
            read(data, "0" * 64)
        with pytest.raises(CorruptChunk):
            Codec().read_info(BytesSource(data), "0" * 64, HERE)


HUGE = (2**63).to_bytes(8, "little")


BROKEN = {
    "empty file": b"",
    "huge header length": HUGE + encode(canonical(), 7)[8:],
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
        Codec().read_info(BytesSource(data), canonical().key, HERE)
