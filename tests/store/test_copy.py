"""Copies from store to store: what comes out of one is what went in, and nothing else gets in."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kamera.ops import code_kv
from kamera.store import ChunkStore, StoreAdmin
from tests.store.builders import CONTEXT, assert_same, canonical, patch, snapshot

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
SECRET, KEY = b"a secret of acme, 32 bytes long!", b"k" * 32

STORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tenant": {"tenant": "acme"},
    "sealed": {"tenant": "acme", "secret": SECRET},
    "encrypted": {"tenant": "beta", "secret": SECRET, "keys": [KEY]},
}
stores = pytest.mark.parametrize("options", STORES.values(), ids=STORES)


def records(tenant: str = "") -> list[Any]:
    context = replace(CONTEXT, tenant=tenant)
    return [
        canonical(A, context, seed=1),
        canonical(B, context, seed=2),
        canonical(A, replace(context, anchor="z"), seed=3),
        patch(B, context, antecedents=(A,)),
        patch(B, context, antecedents=(A, C)),
        patch(B, context, antecedents=(A,), kind="orbit"),
    ]


def put(store: ChunkStore, record: Any) -> str:
    return store.put(record)


def assert_holds(store: ChunkStore, wanted: list[Any]) -> None:
    listed = store.ls()
    assert len(listed) == len(wanted)
    for record in wanted:
        if record.kind == "canonical":
            assert_same(store.get_canonical(record.context, record.chunk_id), record)
        else:
            got = store.get_patch(record.context, record.chunk_id, record.antecedents, record.kind)
            assert_same(got, record)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """A plain store of two canonicals and a patch."""
    path = tmp_path / "exported"
    with ChunkStore.open(tmp_path / "source") as store:
        for record in (canonical(A), canonical(B), patch(B, antecedents=(A,))):
            put(store, record)
        StoreAdmin(store).copy(path)
    return path


def imported(store: ChunkStore, path: Path, **options: Any) -> Any:
    with ChunkStore.open(path, read_only=True) as source:
        return StoreAdmin(source).copy(store, **options)


def file_of(path: Path, record: Any) -> Path:
    return path / "objects" / f"{record.key}.safetensors"


@pytest.mark.few(3)
@stores
@pytest.mark.parametrize("into", STORES.values(), ids=STORES)
def test_a_store_of_any_kind_comes_back_in_one_of_any_kind(
    tmp_path: Path, options: dict[str, Any], into: dict[str, Any]
) -> None:
    with ChunkStore.open(tmp_path / "source", **options) as source:
        for record in records(source.tenant):
            put(source, record)
        done = StoreAdmin(source).copy(tmp_path / "plain")
        assert (done.canonicals, done.patches, done.present, done.refused) == (3, 3, 0, ())
    with ChunkStore.open(tmp_path / "target", **into) as target:
        done = imported(target, tmp_path / "plain")
        assert (done.canonicals, done.patches, done.present, done.refused) == (3, 3, 0, ())
        assert_holds(target, records(target.tenant))
        assert imported(target, tmp_path / "plain").present == 6


def test_an_exported_store_tells_nothing_of_tenant_secret_or_key(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s", tenant="acme corp", secret=SECRET, keys=[KEY]) as store:
        name = store.put(canonical(A, replace(CONTEXT, tenant="acme corp")))
        StoreAdmin(store).copy(tmp_path / "b")
    files = [path for path in (tmp_path / "b").rglob("*") if path.is_file()]
    held = b"".join(path.read_bytes() for path in files)
    assert A.encode() in held
    for hidden in (b"acme corp", name.encode(), SECRET, KEY):
        assert hidden not in held
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}, "for the owner alone"


def test_an_object_that_is_damaged_is_left_out_and_said_so(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s", memory_limit=0) as store:
        names = [put(store, record) for record in records()]
        [file] = (tmp_path / "s").rglob(f"{names[0]}.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        done = StoreAdmin(store).copy(tmp_path / "b")
        assert (done.canonicals, done.patches) == (2, 3)
        [line] = done.refused
        assert names[0] in line


def test_what_is_in_the_store_is_never_replaced_by_a_copy(tmp_path: Path, exported: Path) -> None:
    with ChunkStore.open(tmp_path / "t") as store:
        put(store, canonical(A, seed=9))
        put(store, patch(B, antecedents=(A,), rank=5, seed=9))
        done = imported(store, exported)
        assert (done.canonicals, done.patches, done.present) == (1, 0, 2)
        assert_same(store.get_canonical(CONTEXT, A), canonical(A, seed=9))
        assert_same(store.get_patch(CONTEXT, B, (A,)), patch(B, antecedents=(A,), rank=5, seed=9))


# -- what must not get in ------------------------------------------------------------------------


def test_a_link_in_a_store_is_not_followed(tmp_path: Path, exported: Path) -> None:
    file = file_of(exported, canonical(B))
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with ChunkStore.open(tmp_path / "t") as store:
        done = imported(store, exported)
        assert done.canonicals == 1 and "follows no links" in done.refused[0]


def test_objects_of_a_tenant_stay_where_they_are(tmp_path: Path, exported: Path) -> None:
    with ChunkStore.open(exported, tenant="acme") as store:
        put(store, canonical(C, replace(CONTEXT, tenant="acme")))
    for tenant in ("", "acme"):
        with ChunkStore.open(tmp_path / f"t{tenant}", tenant=tenant) as store:
            done = imported(store, exported)
            assert (done.canonicals, done.refused) == (2, ())
            assert {info.chunk_id for info in store.ls()} == {A, B}


# -- codes ---------------------------------------------------------------------------------------


def finite(chunk: str, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    kv = ({name: torch.randn(2, 40, 64, generator=generator).bfloat16() for name in "kv"},)
    positions = torch.arange(40).expand(3, 40)
    return canonical(chunk, tokens=40, kv=kv, positions=positions)


@pytest.fixture
def coded_root(tmp_path: Path) -> Path:
    with ChunkStore.open(tmp_path / "s") as store:
        for i, name in enumerate("ab"):
            store.put(finite(name * 64, i))
        store.put(patch("a" * 64))
    return tmp_path / "s"


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_what_is_converted_is_what_putting_it_in_codes_gives(
    coded_root: Path, tmp_path: Path, kv: Any
) -> None:
    before = snapshot(coded_root / "objects")
    with ChunkStore.open(coded_root) as source, ChunkStore.open(tmp_path / "t") as target:
        done = StoreAdmin(source).copy(target, kv=kv)
        coded = replace(CONTEXT, kv=kv)
        for i, name in enumerate("ab"):
            original = finite(name * 64, i)
            wanted = replace(original, context=coded, kv=code_kv(original.kv, kv))
            assert_same(target.get_canonical(coded, name * 64), wanted)
            assert target.get_canonical(CONTEXT, name * 64) is None
        assert (done.canonicals, done.present, done.patches, done.refused) == (2, 0, 0, ())
        kv_bytes = [sum(info.bytes for info in store.ls("canonical")) for store in (source, target)]
        assert kv_bytes[1] < kv_bytes[0] * (0.7 if kv == "int8" else 0.5)
        losses = [target.get_canonical(coded, name * 64).loss.relative for name in "ab"]  # type: ignore[union-attr]
        assert done.loss == max(losses) > 0
        again = StoreAdmin(source).copy(target, kv=kv)
        assert (again.canonicals, again.present) == (0, 2)
    assert snapshot(coded_root / "objects") == before


def test_conversion_refuses_values_without_codes(coded_root: Path, tmp_path: Path) -> None:
    with ChunkStore.open(coded_root) as store, ChunkStore.open(tmp_path / "t") as target:
        wild = canonical("c" * 64, kv=({"k": torch.full((1, 3, 4), float("nan"))},))
        names = [store.put(wild)]
        twice = replace(finite("d" * 64), context=replace(CONTEXT, kv="int4"))
        names.append(store.put(twice))
        done = StoreAdmin(store).copy(target, kv="int8")
        assert done.canonicals == 2 and len(done.refused) == 2
        assert all(any(name in line for line in done.refused) for name in names)
        assert any("codes of codes" in line for line in done.refused)
        with pytest.raises(ValueError, match="int8"):
            StoreAdmin(store).copy(target, kv="as-is")
