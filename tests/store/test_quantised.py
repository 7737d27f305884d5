"""Canonicals in codes: what comes back is told apart from what the model computed, by name and by key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera.ops.quantize_kv import KV_CODECS
from kamera.store import CanonicalRecord, ChunkStore, Context, canonical_key, patch_key
from kamera.store.records import to_store_form
from tests.store.builders import (
    CONTEXT,
    assert_same,
    canonical,
    patch,
)

CODECS = pytest.mark.parametrize("codec", KV_CODECS)


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


# -- the object ------------------------------------------------------------------------------------
