"""Canonicals in codes: what comes back is told apart from what the model computed, by name and by key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kamera.errors import CorruptChunk
from kamera.ops import CodedKV, code_kv, kv_map, kv_of
from kamera.ops.quantize_kv import KV_CODECS
from kamera.store import CanonicalRecord, ChunkStore, Context, StoreAdmin, canonical_key, patch_key
from kamera.store.codec import Codec
from kamera.store.records import to_store_form
from kamera.store.sources import BytesSource
from tests.store.builders import (
    CONTEXT,
    assert_same,
    canonical,
    coded_patch,
    decode,
    encode,
    join,
    patch,
    split,
)

CODECS = pytest.mark.parametrize("codec", KV_CODECS)
HERE = "objects/aa/file"


def layers_of(tokens: int, dtype: torch.dtype = torch.bfloat16, dim: int = 8, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    layer = {n: torch.randn(2, tokens, dim, generator=generator).to(dtype) for n in ("k", "v")}
    more = {n: torch.cat((t, -t)) for n, t in layer.items()}  # of another number of heads: a block of its own
    return (layer, {}, {n: 3 * t for n, t in layer.items()}, more)


def record(codec: str, tokens: int = 40, **fields: Any) -> CanonicalRecord:
    """As a window puts it: the context asks for codes, the KV is still as the model computed it."""
    context = replace(CONTEXT, kv=codec)
    return canonical(context=context, tokens=tokens, **({"kv": layers_of(tokens)} | fields))


def open_at(place: Path | str, codec: str) -> ChunkStore:
    return ChunkStore.open(place, kv=codec)  # type: ignore[arg-type]


def forge(made: CanonicalRecord, **changes: Any) -> bytes:
    outer, header, rest = split(encode(to_store_form(made), 7))
    return join(outer, header | changes, rest)


@CODECS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_decoded_kv_keeps_its_dtype_and_is_within_its_loss(codec, dtype, tmp_path):
    put = record(codec, kv=layers_of(40, dtype))
    with open_at(tmp_path, codec) as store:
        key = store.put(put)
    with open_at(tmp_path, codec) as again:
        got = again.get_canonical(put.context, put.chunk_id)
        assert [i.key for i in again.ls()] == [key]
    assert got is not None and got.loss is not None
    off = norm = 0.0
    for mine, theirs in zip(put.kv, got.kv, strict=True):
        assert list(mine) == list(theirs)
        for name, tensor in mine.items():
            assert (theirs[name].dtype, theirs[name].shape) == (dtype, tensor.shape)
            off += float((tensor.double() - theirs[name].double()).square().sum())
            norm += float(tensor.double().square().sum())
    assert got.loss.relative == pytest.approx((off / norm) ** 0.5, rel=1e-3) and got.loss.relative > 0
    assert set(got.loss.channels) == {"k", "v"}
    for name in ("input_ids", "positions"):
        assert torch.equal(getattr(got, name), getattr(put, name))


@CODECS
def test_memory_and_disk_give_back_the_same_bits(codec, tmp_path):
    put = record(codec)
    with open_at("memory://", codec) as memory, open_at(tmp_path, codec) as disk:
        assert memory.put(put) == disk.put(put)
        found = [s.get_canonical(put.context, put.chunk_id) for s in (memory, disk)]
    with open_at(tmp_path, codec) as reopened:
        found.append(reopened.get_canonical(put.context, put.chunk_id))
    for got in found:
        assert got is not None
        assert_same(got, to_store_form(put))


@CODECS
def test_codes_take_the_bytes_they_promise(codec, tmp_path):
    tokens, bare = 256, {"inputs": {}}
    plain = canonical(tokens=tokens, kv=layers_of(tokens, dim=64), **bare)
    coded = record(codec, tokens, kv=layers_of(tokens, dim=64), **bare)
    with ChunkStore.open(tmp_path) as store:
        store.put(plain)
        store.put(coded)
        whole, small = store.ls(kind="canonical")
    assert small.context.kv == codec
    assert small.bytes < whole.bytes * {"int8": 0.57, "int4": 0.36}[codec]
    assert to_store_form(coded).nbytes < plain.nbytes * {"int8": 0.55, "int4": 0.34}[codec]


def test_each_form_has_keys_of_its_own():
    forms = [replace(CONTEXT, kv=kv) for kv in ("as-is", *KV_CODECS)]
    assert len({canonical_key(c, "x") for c in forms}) == 3
    for kind in ("exact", "orbit"):
        assert len({patch_key(c, "x", ("a",), kind) for c in forms}) == 3
    assert canonical_key(forms[0], "x") == canonical_key(Context(CONTEXT.fingerprint, CONTEXT.anchor), "x")
    with pytest.raises(ValueError, match="kv 'int2' is none of as-is, int8, int4"):
        replace(CONTEXT, kv="int2")


@CODECS
def test_a_lossy_canonical_is_never_found_as_an_exact_one(codec, tmp_path):
    put = record(codec)
    exact = replace(put, context=CONTEXT)
    with open_at(tmp_path, codec) as store:
        store.put(put)
        store.put(patch(context=put.context))
        assert store.get_canonical(CONTEXT, put.chunk_id) is None
        assert not store.has(CONTEXT, put.chunk_id)
        assert store.get_patch(CONTEXT, put.chunk_id, ("x", "y")) is None
        assert store.get_patch(put.context, put.chunk_id, ("x", "y")) is not None
        assert store.ls("canonical", context=CONTEXT) == []
        assert store.contexts_of(put.chunk_id) == [put.context]
        store.put(exact)
        assert sorted(c.kv for c in store.contexts_of(put.chunk_id)) == ["as-is", codec]
        got = store.get_canonical(CONTEXT, put.chunk_id)
        lossy = store.get_canonical(put.context, put.chunk_id)
    assert got is not None and got.loss is None and torch.equal(got.kv[0]["k"], put.kv[0]["k"])
    assert lossy is not None and lossy.loss is not None
    assert not torch.equal(lossy.kv[0]["k"], put.kv[0]["k"])


def test_all_forms_share_a_store_opened_for_any_of_them(tmp_path):
    """The option is what windows ask for; an object's form is its context's."""
    made = [record(codec) for codec in KV_CODECS] + [canonical(tokens=40, kv=layers_of(40))]
    with ChunkStore.open(tmp_path) as store:
        assert store.kv == "as-is" and "kv=" not in repr(store)
        for one in made:
            store.put(one)
        assert StoreAdmin(store).verify().ok == 3
        StoreAdmin(store).rebuild_index()
        assert sorted(i.context.kv for i in store.ls()) == ["as-is", "int4", "int8"]
        assert StoreAdmin(store).census().contexts == 3
        for one in made:
            got = store.get_canonical(one.context, one.chunk_id)
            assert got is not None
            assert_same(got, to_store_form(one))
    with open_at(tmp_path, "int8") as store:
        assert store.kv == "int8" and "kv='int8'" in repr(store)
        (row,) = store.ls("canonical", context=made[0].context)
        assert row.context.kv == "int8"


def test_a_store_of_an_unknown_form_is_not_made(tmp_path):
    with pytest.raises(ValueError, match="kv 'int3' is none of"):
        open_at(tmp_path / "new", "int3")
    assert not (tmp_path / "new").exists()


@CODECS
def test_values_without_codes_are_refused_and_not_stored(codec, tmp_path):
    kv = layers_of(5)
    kv[2]["v"][1, 2, 3] = float("nan")
    with open_at(tmp_path, codec) as store:
        with pytest.raises(ValueError, match="layer 2 channel 'v' holds values that are not finite"):
            store.put(record(codec, 5, kv=kv))
        assert store.ls() == []
        store.put(replace(record(codec, 5, kv=kv), context=CONTEXT))  # as it is, it may
        assert len(store.ls()) == 1


def test_the_first_canonical_under_a_key_stays(tmp_path):
    one, other = record("int8"), record("int8", kv=layers_of(40, seed=5))
    with open_at(tmp_path, "int8") as store:
        assert store.put(one) == store.put(other)
        got = store.get_canonical(one.context, one.chunk_id)
    assert got is not None
    assert_same(got, to_store_form(one))


# -- the object ------------------------------------------------------------------------------------


@CODECS
def test_the_header_says_codec_grid_and_loss(codec):
    put = to_store_form(record(codec))
    outer, header, _ = split(encode(put, 7))
    assert header["context"]["kv"] == codec
    said = header["coded"]
    assert (said["bits"], said["group"]) == {"int8": (8, 0), "int4": (4, 32)}[codec]
    assert said["axes"] == {"k": "tokens", "v": "features"}
    assert put.loss is not None and said["loss"]["relative"] == put.loss.relative
    assert set(said["loss"]) == {"relative", "largest", "channels"}
    assert outer["kv/0/k/codes"]["dtype"] == "U8" and "kv/0/k" not in outer
    assert outer["kv/0/v/steps"]["dtype"] == outer["kv/0/v/lows"]["dtype"] == "BF16"


def test_kv_as_it_is_is_written_as_ever():
    for plain in (canonical(), patch()):
        _, header, _ = split(encode(plain, 7))
        assert "kv" not in header["context"] and "coded" not in header


@given(
    st.integers(0, 5),
    st.sampled_from(KV_CODECS),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(1, 5),
    st.integers(0, 99),
)
def test_a_coded_record_comes_back_bit_for_bit(tokens, codec, dtype, dim, seed):
    put = to_store_form(record(codec, tokens, kv=layers_of(tokens, dtype, dim, seed)))
    data = encode(put, 1.5)
    assert_same(decode(data, put.key, HERE), put)
    info = Codec().read_info(BytesSource(data), put.key, HERE)
    assert info == Codec().describe(put, 1.5, len(data)) and info.context == put.context


@pytest.mark.parametrize("made", [patch, coded_patch])
def test_a_patch_of_a_coded_canonical_comes_back(made):
    put = replace(made(), context=replace(CONTEXT, kv="int8"))
    data = encode(put, 7)
    _, header, _ = split(data)
    assert header["context"]["kv"] == "int8" and ("factors" in header) == (made is coded_patch)
    assert_same(decode(data, put.key, HERE), put)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h: {"context": {k: v for k, v in h["context"].items() if k != "kv"}}, "not that of its own"),
        (lambda h: {"context": h["context"] | {"kv": "int4"}}, "not that of its own"),
        (lambda h: {"context": h["context"] | {"kv": "int2"}}, "kv 'int2' is none of"),
        (lambda h: {"coded": None}, "object"),
        (lambda h: {"coded": h["coded"] | {"bits": 4}}, "4-bit codes"),
        (lambda h: {"coded": h["coded"] | {"bits": 7}}, "bits 7"),
        (lambda h: {"coded": h["coded"] | {"bits": 8.0}}, "whole numbers"),
        (lambda h: {"coded": h["coded"] | {"group": 64}}, "8-bit codes under a context of kv='int8'"),
        (lambda h: {"coded": h["coded"] | {"axes": {"k": "tokens"}}}, "missing"),
        (lambda h: {"coded": h["coded"] | {"axes": {"k": "features", "v": "features"}}}, "steps must be"),
        (lambda h: {"coded": h["coded"] | {"axes": h["coded"]["axes"] | {"x": "tokens"}}}, "disagree"),
        (lambda h: {"coded": h["coded"] | {"more": 1}}, "disagree"),
        (lambda h: {"coded": h["coded"] | {"loss": {"relative": 0.1}}}, "largest"),
        (lambda h: {"coded": h["coded"] | {"loss": h["coded"]["loss"] | {"relative": -1}}}, "at least 0"),
        (lambda h: {"coded": h["coded"] | {"loss": h["coded"]["loss"] | {"channels": 3}}}, "int"),
        (lambda h: {"channels": [["k"], [], ["k", "v"]]}, "does not name"),
    ],
)
def test_a_header_that_lies_about_codes_is_damage(change, says):
    made = record("int8")
    _, header, _ = split(encode(to_store_form(made), 7))
    with pytest.raises(CorruptChunk, match=says):
        decode(forge(made, **change(header)), made.key, HERE)


def test_a_header_without_its_codes_is_damage():
    made = record("int8")
    outer, header, rest = split(encode(to_store_form(made), 7))
    del header["coded"]
    with pytest.raises(CorruptChunk, match="coded"):
        decode(join(outer, header, rest), made.key, HERE)


@CODECS
def test_a_flipped_byte_anywhere_is_a_refusal(codec):
    made = to_store_form(record(codec, 3))
    data = encode(made, 7)
    for at in range(0, len(data), 7):
        with pytest.raises(CorruptChunk):
            decode(data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :], made.key, HERE)


def test_a_record_whose_codes_are_of_another_form_cannot_be_made():
    coded = code_kv(kv_of(layers_of(3)), "int4")
    for form in ("as-is", "int8"):
        with pytest.raises(ValueError, match=f"4-bit codes under a context of kv='{form}'"):
            canonical(context=replace(CONTEXT, kv=form), kv=coded)
    with pytest.raises(ValueError, match="not coded yet"):
        encode(record("int8"), 7)


def test_a_kept_record_is_kept_as_it_is_and_reads_as_a_kv():
    put = to_store_form(record("int4"))
    assert to_store_form(put) is put and isinstance(put.kv, CodedKV)
    dense = kv_map(put.kv, lambda t: t)
    assert [list(layer) for layer in dense] == [["k", "v"], [], ["k", "v"], ["k", "v"]]
    assert json.loads(json.dumps(put.header()["coded"])) == put.header()["coded"]
    plain = canonical()
    assert to_store_form(plain) is plain
