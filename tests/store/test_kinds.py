"""Encodings and anchors are objects like canonicals and patches, in all that a store does with objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kamera.errors import CorruptChunk, IncompatibleChunk
from kamera.store import (
    ChunkStore,
    Context,
    EncodingRecord,
    StoreAdmin,
    encoding_context,
    object_key,
    patch_key,
)
from kamera.store.eviction import choose
from kamera.store.info import Weighed
from tests.store.builders import (
    CHUNK,
    CONTEXT,
    VISION,
    anchor,
    assert_same,
    canonical,
    decode,
    drop_index,
    encode,
    encoding,
    file_of,
    flip,
    join,
    patch,
    split,
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


def test_a_list_of_twelve_comes_back_by_number():
    record = listed(*range(11, -1, -1))
    assert record.header()["embeds"] == [f"x.{number}" for number in range(12)]
    read = decode(encode(record, 7), record.key, "here")
    assert_same(read, record)
    assert list(read.embeds) == [f"x.{number}" for number in range(12)]


def test_a_list_with_a_gap_is_no_encoding():
    with pytest.raises(ValueError, match=r"^x\.2 is out of place"):
        listed(0, 2)
    outer, kamera, rest = split(encode(listed(0, 1), 7))
    kamera["embeds"] = ["x.0", "x.2"]
    outer = {name.replace("x.1", "x.2"): entry for name, entry in outer.items()}
    with pytest.raises(CorruptChunk, match=r"here: x\.2 is out of place"):
        decode(join(outer, kamera, rest), listed(0, 1).key, "here")


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


def test_another_tenants_encoding_is_refused(tmp_path):
    with ChunkStore.open(tmp_path / "s") as store, pytest.raises(IncompatibleChunk):
        store.put(encoding(tenant="acme"))


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


@pytest.mark.parametrize(
    "record, changes",
    [
        (encoding(), {"tokens": -1}),
        (encoding(), {"embeds": []}),
        (encoding(), {"context": {"fingerprint": VISION, "anchor": "a", "tenant": ""}}),
        (anchor(), {"chunk_id": "c" * 64}),
        (anchor(), {"kind": "canonical"}),
        (canonical(), {"behind": True}),
        (canonical(), {"vision": 5}),
        (based(), {"base": None}),
        (based(), {"base": "c" * 64}),
    ],
)
def test_a_forged_header_is_refused(record, changes):
    outer, header, rest = split(encode(record, 7.0))
    assert_same(decode(join(outer, header, rest), record.key, "here"), record)
    with pytest.raises(CorruptChunk):
        decode(join(outer, header | changes, rest), record.key, "here")


def test_no_key_is_anothers():
    keys = [record.key for record in all_kinds()]
    keys += [encoding("d" * 64).key, encoding(vision="g" * 64).key, encoding(tenant="t").key]
    keys += [patch_key(ELSEWHERE, CHUNK, (), "exact"), canonical("").key, canonical(CONTEXT.anchor).key]
    assert len(set(keys)) == len(keys)
    with pytest.raises(ValueError, match="no encoding is of"):
        object_key("encoding", CONTEXT, CHUNK)
    with pytest.raises(ValueError, match="no anchor is of"):
        object_key("anchor", CONTEXT, CHUNK)


def test_a_store_counts_them_apart(tmp_path):
    for url in (str(tmp_path / "s"), "memory://"):
        with ChunkStore.open(url) as store:
            for record in all_kinds():
                store.put(record)
            stats, census = StoreAdmin(store).stats(), StoreAdmin(store).census()
        assert (stats.encodings, stats.anchors, stats.canonicals, stats.patches) == (1, 1, 1, 2)
        assert stats.objects == 5
        assert (census.chunks, census.contexts) == (1, 2)
        assert census.kinds["encoding"].objects == census.kinds["anchor"].objects == 1


# -- what leaves -----------------------------------------------------------------------------------


def weighed(key: str, kind: str, anchor: str = "a", base: str = "", size: int = 10, **more: Any) -> Weighed:
    fingerprint = "v" if kind == "encoding" else "f"
    where = "" if kind == "encoding" else anchor
    row = Weighed(key, kind, "chunk", fingerprint, where, "", "as-is", base, 10, size, 1.0)
    return row._replace(**more)


def leaving(rows: list[Weighed], pinned: set[str], limit: int | None) -> list[str]:
    return [victim.object.key for victim in choose(rows, pinned, limit, 2.0)]


def test_an_encoding_leaves_behind_the_last_canonical():
    rows = [
        weighed("e", "encoding", size=1000),
        weighed("c1", "canonical", base="v"),
        weighed("c2", "canonical", "b", base="v"),
        weighed("start", "anchor", chunk_id="a"),
    ]
    assert leaving(rows, set(), 25) == ["c1", "c2", "e"]
    assert leaving(rows, {"c1"}, 0) == ["c2", "start"]
    assert leaving(rows, set(), None) == []
    assert leaving(rows[:1], set(), 0) == ["e"]


def test_a_based_patch_lives_by_the_canonical_it_is_added_to():
    shared = weighed("p", "exact", "b", base="a")
    assert leaving([shared], set(), None) == ["p"]
    assert leaving([shared, weighed("c", "canonical", "b")], set(), None) == ["p"]
    assert leaving([shared, weighed("c", "canonical")], set(), None) == []
    assert leaving([shared, weighed("c", "canonical")], set(), 0)[-1] == "c"


def test_a_limit_lets_an_encoding_go_last(tmp_path):
    chunks = [f"{n:064x}" for n in range(4)]
    with ChunkStore.open(tmp_path / "s") as store:
        for chunk in chunks:
            store.put(encoding(chunk))
            store.put(canonical(chunk, vision=VISION))
        size = StoreAdmin(store).stats().bytes
    with ChunkStore.open(tmp_path / "s", disk_limit=size) as store:
        store.put(encoding("e" * 64))  # the smaller kind: one that leaves makes room
        kinds = {(info.kind, info.chunk_id) for info in store.ls()}
    assert ("canonical", chunks[0]) not in kinds and len(kinds) == 2 * len(chunks)
    assert all(("encoding", chunk) in kinds for chunk in chunks)


def test_forgetting_a_chunk_leaves_nothing_of_any_kind(tmp_path):
    with ChunkStore.open(tmp_path / "s") as store:
        for record in (*all_kinds(), encoding("d" * 64), canonical("d" * 64, vision=VISION)):
            store.put(record)
        done = StoreAdmin(store).forget(CHUNK)
        assert done.left == () and len(done.removed) == 4
        assert sorted(i.kind for i in store.ls()) == ["anchor", "canonical", "encoding"]


def test_a_damaged_copy_of_an_encoding_is_forgotten_by_its_name(tmp_path):
    with ChunkStore.open(tmp_path / "s", memory_limit=0) as store:
        key = store.put(encoding())
        store.put(encoding("d" * 64))  # by which the vision fingerprint is known
        flip(file_of(tmp_path / "s", key), 120)  # in the header
        assert StoreAdmin(store).forget(CHUNK).left == ()
        assert StoreAdmin(store).quarantine.copies() == []


# -- to another machine ----------------------------------------------------------------------------


def test_a_copy_carries_encodings_and_anchors(tmp_path):
    with ChunkStore.open(tmp_path / "one", tenant="acme") as store:
        for record in (*all_kinds(ACME), encoding("d" * 64, tenant="acme")):
            store.put(record)
        done = StoreAdmin(store).copy(tmp_path / "two", [CHUNK])
        assert (done.canonicals, done.patches, done.encodings, done.anchors) == (1, 1, 1, 1)
        assert done.refused == () and StoreAdmin(store).copy(tmp_path / "two", [CHUNK]).present == 4
    with ChunkStore.open(tmp_path / "two") as store:
        assert_same(store.get_encoding(VISION, CHUNK), encoding())
        assert_same(store.get_anchor(CONTEXT), anchor())
        assert store.get_canonical(CONTEXT, CHUNK).vision == VISION


def test_a_converted_store_has_them_as_they_were(tmp_path):
    import torch

    finite = {"kv": ({"k": torch.ones(2, 3, 4), "v": torch.ones(2, 3, 4)},), "vision": VISION}
    with ChunkStore.open(tmp_path / "s") as one, ChunkStore.open(tmp_path / "t") as two:
        for record in (encoding(), anchor(), canonical(**finite), patch()):
            one.put(record)
        done = StoreAdmin(one).copy(two, kv="int8")
        assert (done.canonicals, done.patches, done.refused) == (1, 0, ())
        assert_same(two.get_anchor(CONTEXT), anchor())
        assert_same(two.get_encoding(VISION, CHUNK), encoding())


def test_pins_hold_the_encoding_of_a_pinned_canonical(tmp_path):
    with ChunkStore.open(tmp_path / "s") as store:
        keys = [store.put(record) for record in all_kinds()]
        StoreAdmin(store).pin([keys[2]])
        StoreAdmin(store).gc(0)
        assert {info.kind for info in store.ls()} == {"encoding", "canonical"}
        StoreAdmin(store).unpin([keys[2]])
        StoreAdmin(store).gc(0)
        assert store.ls() == []


def test_encodings_are_nobodys_context():
    assert encoding_context(VISION, "t") == Context(VISION, "", "t")
