"""Encodings and anchors are objects like canonicals and patches, in all that a store does with objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kamera.errors import CorruptChunk
from kamera.store import (
    ChunkStore,
    Context,
    EncodingRecord,
    StoreAdmin,
    object_key,
    patch_key,
)
from tests.store.builders import (
    CHUNK,
    CONTEXT,
    VISION,
    anchor,
    assert_same,
    canonical,
    drop_index,
    encoding,
    file_of,
    flip,
    patch,
)

ACME = replace(CONTEXT, tenant="acme")
STORES: dict[str, dict[str, Any]] = {
    "plain": {"tenant": "acme"},
    "sealed": {"tenant": "acme", "secret": b"a secret of acme, 32 bytes long!"},
    "encrypted": {"tenant": "acme", "secret": b"a secret of acme, 32 bytes long!", "keys": [b"k" * 32]},
}
ELSEWHERE = replace(CONTEXT, anchor="b" * 64)


def based(chunk: str = CHUNK, context: Context = ELSEWHERE, base: str = CONTEXT.anchor) -> Any:
    return replace(patch(chunk, context, antecedents=()), base=base)


def all_kinds(context: Context = CONTEXT) -> list[Any]:
    other = replace(ELSEWHERE, tenant=context.tenant)
    return [
        encoding(tenant=context.tenant),
        anchor(context),
        canonical(context=context, vision=VISION, behind=5),
        patch(context=context),
        based(context=other),
    ]


def listed(*numbers: int) -> EncodingRecord:
    """An encoding with a list of entries of these numbers."""
    entries = {f"x.{number}": torch.full((2,), float(number)) for number in numbers}
    return replace(encoding(), embeds=entries)


@pytest.mark.parametrize("options", STORES.values(), ids=STORES)
def test_every_kind_comes_back_from_every_store(options, tmp_path):
    with ChunkStore.open(tmp_path / "s", memory_limit=0, **options) as store:
        names = [store.put(record) for record in all_kinds(ACME)]
        seen, start, whole, exact, shared = all_kinds(ACME)
        assert_same(store.get_encoding(VISION, CHUNK), seen)
        assert_same(store.get_anchor(ACME), start)
        assert_same(store.get_anchor(replace(ACME, kv="int8")), start)  # never in codes
        assert_same(store.get_canonical(ACME, CHUNK), whole)
        assert_same(store.get_patch(ACME, CHUNK, ("x", "y")), exact)
        assert_same(store.get_patch(shared.context, CHUNK, (), base=ACME.anchor), shared)
        assert store.get_patch(shared.context, CHUNK, ()) is None
        assert {info.key for info in store.ls()} == set(names)
        listed = {info.kind: info for info in store.ls() if not info.context.anchor.startswith("b")}
        assert listed["canonical"].base == listed["encoding"].context.fingerprint == VISION
        assert (listed["canonical"].behind, listed["anchor"].tokens) == (5, 5)
        before = store.ls()
        assert StoreAdmin(store).verify().ok == 5
        assert StoreAdmin(store).rebuild_index() == 5 and store.ls() == before
    for root in (tmp_path / "s").rglob("index.sqlite"):
        drop_index(root.parent)
    with ChunkStore.open(tmp_path / "s", **options) as store:
        assert sorted(i.key for i in store.ls()) == sorted(names)
        assert {(i.base, i.behind) for i in store.ls()} == {(i.base, i.behind) for i in before}


@pytest.mark.parametrize("kind", ["encoding", "anchor"])
def test_damage_is_refused_once_and_then_a_miss(kind, tmp_path):
    with ChunkStore.open(tmp_path / "s", memory_limit=0) as store:
        keys = [store.put(record) for record in all_kinds()]
        flip(file_of(tmp_path / "s", keys[0 if kind == "encoding" else 1]))
        read = (lambda: store.get_encoding(VISION, CHUNK)) if kind == "encoding" else None
        read = read or (lambda: store.get_anchor(CONTEXT))
        with pytest.raises(CorruptChunk, match="have changed"):
            read()
        assert read() is None and len(StoreAdmin(store).quarantine.copies()) == 1
        assert len(store.ls()) == 4


def test_no_key_is_anothers():
    keys = [record.key for record in all_kinds()]
    keys += [encoding("d" * 64).key, encoding(vision="g" * 64).key, encoding(tenant="t").key]
    keys += [patch_key(ELSEWHERE, CHUNK, (), "exact"), canonical("").key, canonical(CONTEXT.anchor).key]
    assert len(set(keys)) == len(keys)
    with pytest.raises(ValueError, match="no encoding is of"):
        object_key("encoding", CONTEXT, CHUNK)
    with pytest.raises(ValueError, match="no anchor is of"):
        object_key("anchor", CONTEXT, CHUNK)


# -- what leaves -----------------------------------------------------------------------------------


def test_forgetting_a_chunk_leaves_nothing_of_any_kind(tmp_path):
    with ChunkStore.open(tmp_path / "s") as store:
        for record in (*all_kinds(), encoding("d" * 64), canonical("d" * 64, vision=VISION)):
            store.put(record)
        done = StoreAdmin(store).forget(CHUNK)
        assert done.left == () and len(done.removed) == 4
        assert sorted(i.kind for i in store.ls()) == ["anchor", "canonical", "encoding"]


# -- to another machine ----------------------------------------------------------------------------
