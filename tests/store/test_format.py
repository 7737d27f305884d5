from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.errors import CorruptChunk, StoreVersionError
from kamera.ops.patch import LowRank, Patch
from kamera.store import PatchRecord
from kamera.store.format import decode, describe, encode, read_info

from .builders import (
    CONTEXT,
    assert_same,
    canonical,
    coded_patch,
    join,
    patch,
    records,
    seal,
    split,
    tensor,
)

HERE = "objects/aa/file"
REFUSALS = (CorruptChunk, StoreVersionError)


def read(data: bytes, key: str) -> Any:
    return decode(data, key, HERE)


@settings(deadline=None, max_examples=100)
@given(records)
def test_a_record_comes_back_bit_for_bit(record: Any) -> None:
    data = encode(record, 1.5)
    assert_same(read(data, record.key), record)
    info = describe(record, 1.5, len(data))
    assert read_info(io.BytesIO(data), len(data), record.key, HERE) == info
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
    assert header["format"] == 2
    assert header["factors"][1]["v"] == ["left_codes", "left_scales", "right"]
    assert header["rank"] == max(rank, 2)
    back = read(data, record.key)
    assert_same(back, record)
    assert back.nbytes == record.patch.nbytes == sum(t.nbytes for t in record.tensors().values())
    for name, factors in record.patch.layers[1].items():
        mine, theirs = factors.dense(), back.patch.layers[1][name].dense()
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def test_what_an_older_version_can_read_is_written_for_it() -> None:
    for record in (canonical(), patch()):
        _, header, _ = split(encode(record, 7))
        assert header["format"] == 1 and "factors" not in header


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 1}, "disagree"),
        ({"factors": None}, "object"),
        ({"factors": [{}, {}]}, "missing"),
        ({"factors": [{}, {c: ["left", "right"] for c in "kvx"}]}, "missing"),
        (
            {"factors": [{}, {"k": ["left_codes", "right_codes", "right_scales"], "v": [], "x": []}]},
            "missing",
        ),
    ],
)
def test_a_header_that_lies_about_codes_is_damage(change: dict[str, Any], says: str) -> None:
    record = coded_patch()
    with pytest.raises(CorruptChunk, match=says):
        read(forge(record, **change), record.key)


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
    assert data[8:35] == b'{"__metadata__":{"digest":"'


def test_every_tensor_starts_at_a_multiple_of_its_element_size() -> None:
    odd = {"a": torch.ones(3, dtype=torch.int8), "b": torch.ones(1, dtype=torch.float64)}
    data = encode(canonical(inputs=odd), 7)
    outer, _, rest = split(data)
    assert (len(data) - len(rest)) % 8 == 0
    for name, one in canonical(inputs=odd).tensors().items():
        assert outer[name]["data_offsets"][0] % one.element_size() == 0


def test_aliased_strided_and_grad_tensors_are_stored_by_value() -> None:
    base = tensor((2, 3, 4), torch.float16, 5)
    wide = tensor((2, 3, 8), torch.float32, 6).requires_grad_()
    strided = tensor((3, 2, 4), torch.float16, 7).transpose(0, 1)
    layers = ({"k": base, "v": base}, {"k": wide[..., ::2], "v": strided})
    record = canonical(kv=layers, positions=torch.arange(3).flip(0).expand(3, 3))
    back = read(encode(record, 7), record.key)
    assert_same(back, record)
    back.kv[0]["k"].zero_()
    assert back.kv[0]["v"].any()


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


@settings(deadline=None, max_examples=100)
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


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_forged_file_with_a_good_digest_is_refused_by_name_or_read(draw: st.DataObject) -> None:
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


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(noise: bytes) -> None:
    sealed = seal((200).to_bytes(8, "little") + b'{"__metadata__":{"digest":"' + b"0" * 64 + noise)
    for data in (noise, sealed):
        with pytest.raises(CorruptChunk):
            read(data, "0" * 64)
        with pytest.raises(CorruptChunk):
            read_info(io.BytesIO(data), len(data), "0" * 64, HERE)


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
        read_info(io.BytesIO(data), len(data), canonical().key, HERE)


def forge(record: Any, **changes: Any) -> bytes:
    """The file of ``record`` with header fields changed (None removes) and a good digest."""
    outer, kamera, rest = split(encode(record, 7))
    for name, value in changes.items():
        kamera[name] = value
        if value is None:
            del kamera[name]
    return join(outer, kamera, rest)


FORGED = {
    "unknown kind": ({"kind": "near"}, "kind"),
    "patch kind": ({"kind": "exact"}, "antecedents"),
    "no kind": ({"kind": None}, "kind"),
    "no context": ({"context": None}, "context"),
    "context of other fields": ({"context": {"fingerprint": "f"}}, "anchor"),
    "another chunk": ({"chunk_id": "other"}, "key"),
    "another tenant": ({"context": {**vars(CONTEXT), "tenant": "you"}}, "key"),
    "another key": ({"key": "0" * 64}, "key"),
    "chunk id is a number": ({"chunk_id": 5}, "header"),
    "no version": ({"format": None}, "format"),
    "version 0": ({"format": 0}, "version"),
    "version is true": ({"format": True}, "version"),
    "version is text": ({"format": "1"}, "version"),
    "no info": ({"info": None}, "info"),
    "info is a list": ({"info": []}, "info"),
    "wrong number of tokens": ({"tokens": 4}, "tokens"),
    "tokens as float": ({"tokens": 3.0}, "tokens"),
    "a field that is not known": ({"color": "red"}, "color"),
    "created is text": ({"created": "now"}, "created"),
    "created is far too much": ({"created": 10**400}, "created"),
    "a layer that has no tensors": ({"layers": [["k", "v"], ["k"]]}, "kv/00001/k"),
    "a layer less": ({"layers": [["k"], []]}, "kv/00000/v"),
    "layers that are none": ({"layers": 5}, "int"),
    "layers as text": ({"layers": ["kv", ""]}, "layers"),
    "an input less": ({"inputs": []}, "inputs/image_grid_thw"),
    "an embed more": ({"embeds": ["inputs_embeds", "x"]}, "embeds/x"),
}


@pytest.mark.parametrize("changes, says", FORGED.values(), ids=FORGED)
def test_a_header_that_disagrees_is_refused(changes: dict[str, Any], says: str) -> None:
    record = canonical()
    assert_same(read(forge(record), record.key), record)  # the forge itself is sound
    with pytest.raises(CorruptChunk, match=says) as caught:
        read(forge(record, **changes), record.key)
    assert HERE in str(caught.value)


@pytest.mark.parametrize("changes", [{"rank": 3}, {"rank": None}, {"rank": -1}, {"formed": 5}])
def test_a_patch_header_that_lies_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptChunk):
        read(forge(patch(), **changes), patch().key)


def test_antecedents_are_bound_by_the_key() -> None:
    with pytest.raises(CorruptChunk, match="key"):
        read(forge(patch(), antecedents=["y", "x"]), patch().key)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "7", "{}", "[" * 200_000, '{"format":1,"format":1}', '{"format":NaN}'],
    ids=lambda text: text[:12],
)
def test_a_kamera_header_that_is_no_header_is_refused(text: str) -> None:
    outer, _, rest = split(encode(canonical(), 7))
    with pytest.raises(CorruptChunk):
        read(join(outer, text, rest), canonical().key)


def test_a_header_in_other_than_the_canonical_form_is_refused() -> None:
    outer, kamera, rest = split(encode(canonical(), 7))
    with pytest.raises(CorruptChunk, match="canonical form"):
        read(join(outer, json.dumps(kamera), rest), canonical().key)


def tampered_tensor(name: str, **changes: Any) -> bytes:
    outer, kamera, rest = split(encode(canonical(), 7))
    outer[name] = {**outer[name], **changes}
    return join(outer, kamera, rest)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("kv/00000/k", {"shape": [3, 2, 4]}),
        ("kv/00000/k", {"shape": [24]}),
        ("kv/00000/k", {"shape": [2, 3, 5]}),
        ("kv/00000/k", {"dtype": "F4"}),
        ("kv/00000/k", {"dtype": "X9"}),
        ("kv/00000/k", {"data_offsets": [0, 2**62]}),
        ("kv/00000/k", {"data_offsets": [-1, 8]}),
        ("positions", {"shape": [9]}),
        ("positions", {"shape": [1, 9]}),
        ("input_ids", {"dtype": "F64"}),
        ("input_ids", {"shape": [3, 1]}),
    ],
)
def test_tensor_entries_that_disagree_are_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptChunk, match=HERE):
        read(tampered_tensor(name, **changes), canonical().key)


def test_a_missing_and_a_surplus_tensor_are_refused() -> None:
    outer, kamera, rest = split(encode(canonical(), 7))
    last = max(outer, key=lambda n: outer[n].get("data_offsets", [0, 0])[1])
    cut = {n: v for n, v in outer.items() if n != last}
    with pytest.raises(CorruptChunk, match=last):
        read(join(cut, kamera, rest[: outer[last]["data_offsets"][0]]), canonical().key)
    more = outer | {"extra": {"dtype": "U8", "shape": [2], "data_offsets": [len(rest), len(rest) + 2]}}
    with pytest.raises(CorruptChunk, match="extra"):
        read(join(more, kamera, rest + b"ab"), canonical().key)


def test_missing_metadata_is_refused() -> None:
    outer, kamera, rest = split(encode(canonical(), 7))
    data = join(outer, kamera, rest).replace(b'"kamera":', b'"camera":')
    with pytest.raises(CorruptChunk, match="kamera"):
        read(seal(data), canonical().key)


def test_an_intact_object_of_a_newer_format_names_both_versions() -> None:
    data = forge(canonical(), format=4, layers={"some": "thing new"})
    with pytest.raises(StoreVersionError, match=r"format 4.*up to 3"):
        read(data, canonical().key)
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(CorruptChunk):
        read(damaged, canonical().key)


def test_an_object_asked_for_under_another_key_is_refused() -> None:
    with pytest.raises(CorruptChunk, match="expected"):
        read(encode(canonical(), 7), canonical("d" * 64).key)


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


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"input_ids": torch.zeros(3)}, "input_ids"),
        ({"input_ids": torch.arange(4)}, "positions"),
        ({"positions": torch.arange(3)}, "positions"),
        ({"kv": ({"k": torch.zeros(2, 4, 4)},)}, "layer 0 channel 'k'"),
        ({"kv": ({}, {"v": torch.zeros(3, 4)})}, "layer 1 channel 'v'"),
        ({"info": []}, "info"),
        ({"chunk": 5}, "chunk_id"),
    ],
)
def test_a_canonical_whose_parts_disagree_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        canonical(**fields)


def test_a_patch_whose_parts_disagree_is_refused() -> None:
    one, two = (LowRank(torch.zeros(n, 2), torch.zeros(8, 2)) for n in (3, 4))
    with pytest.raises(ValueError, match="layer 1"):
        PatchRecord("c", CONTEXT, (), "exact", Patch(({"v": one}, {"v": two})), "exact")
    with pytest.raises(ValueError, match="kind"):
        patch(kind="near")
    with pytest.raises(ValueError, match="antecedents"):
        patch(antecedents=(1,))  # type: ignore[arg-type]


def test_nbytes_counts_every_tensor() -> None:
    assert canonical().nbytes == 3 * 8 + 9 * 8 + 2 * (2 * 3 * 4) * 2 + 3 * 8 + 3 * 6 * 2
    assert patch(rank=2).nbytes == (3 + 8) * 2 * 2
