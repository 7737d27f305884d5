"""Copies from store to store: what comes out of one is what went in, and nothing else gets in."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kamera.errors import StoreError, UnknownChunk
from kamera.store import ChunkStore, Context, StoreAdmin, certificate_folders
from tests.store.builders import CONTEXT, assert_same, canonical, coded_patch, encode, join, patch, split

A, B, C = ("a" * 64, "b" * 64, "c" * 64)
SECRET, KEY = b"a secret of acme, 32 bytes long!", b"k" * 32
CERTIFICATE = f"{CONTEXT.fingerprint[:16]}-32.json"

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
    """A plain store of two canonicals and a patch, and a certificate."""
    path = tmp_path / "exported"
    with ChunkStore.open(tmp_path / "source") as store:
        for record in (canonical(A), canonical(B), patch(B, antecedents=(A,))):
            put(store, record)
        (tmp_path / "source" / "certificates").mkdir()
        (tmp_path / "source" / "certificates" / CERTIFICATE).write_text('{"a": 1}')
        StoreAdmin(store).copy(path)
    return path


def imported(store: ChunkStore, path: Path, **options: Any) -> Any:
    with ChunkStore.open(path, read_only=True) as source:
        return StoreAdmin(source).copy(store, **options)


def file_of(path: Path, record: Any) -> Path:
    return path / "objects" / f"{record.key}.safetensors"


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


def test_chosen_chunks_take_along_the_patches_that_need_no_other(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with ChunkStore.open(tmp_path / "s") as store:
        for record in records():
            put(store, record)
        done = StoreAdmin(store).copy(tmp_path / "b", [A, B], progress=lambda *counts: told.append(counts))
        assert (done.canonicals, done.patches) == (3, 2)  # not the one behind c
        done = StoreAdmin(store).copy(tmp_path / "one", [B])
        assert (done.canonicals, done.patches) == (1, 0)
        with pytest.raises(UnknownChunk, match="nothing was copied"):
            StoreAdmin(store).copy(tmp_path / "none", [A, C])
    assert told == [(i, 5) for i in range(1, 6)]
    assert not (tmp_path / "none").exists()


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


def test_each_object_is_new_to_one_of_several_copies(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "source") as source:
        for record in records():
            put(source, record)
        ready = threading.Barrier(8)

        def run(_: int) -> Any:
            ready.wait()
            return StoreAdmin(source).copy(tmp_path / "target")

        with ThreadPoolExecutor(8) as pool:
            done = list(pool.map(run, range(8)))
    assert [one.refused for one in done] == [()] * 8
    assert sum(one.canonicals for one in done) == 3 and sum(one.patches for one in done) == 3
    assert sum(one.present for one in done) == 8 * 6 - 6
    with ChunkStore.open(tmp_path / "target") as target:
        assert_holds(target, records())


def test_a_canonical_in_codes_stays_the_same_codes(tmp_path: Path) -> None:
    context = replace(CONTEXT, kv="int8", tenant="acme")
    record = canonical(A, context, kv=({"k": torch.randn(2, 3, 4), "v": torch.randn(2, 3, 4)},))
    with (
        ChunkStore.open(tmp_path / "s", tenant="acme", kv="int8") as store,
        ChunkStore.open(tmp_path / "t", tenant="acme", secret=SECRET, memory_limit=0) as other,
    ):
        store.put(record)
        assert StoreAdmin(store).copy(other).refused == ()
        assert_same(other.get_canonical(context, A), store.get_canonical(context, A))


# -- what must not get in ------------------------------------------------------------------------


def newer(record: Any) -> bytes:
    outer, header, rest = split(encode(record, 1.0))
    return join(outer, header | {"format": 9}, rest)


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


FORGED: dict[str, tuple[bytes, str]] = {
    "damaged": (flipped(encode(canonical(B), 1.0)), "digest"),
    "of a newer format": (newer(canonical(B)), "format 9"),
    "of another key": (encode(canonical(C), 1.0), "expected"),
    "of a tenant": (encode(canonical(B, Context(CONTEXT.fingerprint, CONTEXT.anchor, "x")), 1.0), "expected"),
    "no object": (b"{}" * 100, "impossible header"),
    "empty": (b"", "truncated"),
}


@pytest.mark.parametrize("data, message", FORGED.values(), ids=FORGED)
def test_an_invalid_object_is_refused_by_name_and_the_rest_is_copied(
    tmp_path: Path, exported: Path, data: bytes, message: str
) -> None:
    file_of(exported, canonical(B)).write_bytes(data)
    before = sorted(exported.rglob("*"))
    with ChunkStore.open(tmp_path / "t") as store:
        done = imported(store, exported)
        assert (done.canonicals, done.patches) == (1, 1)
        [line] = done.refused
        assert canonical(B).key in line and message in line
        assert store.get_canonical(CONTEXT, B) is None
    assert sorted(exported.rglob("*")) == before, "nothing is moved in a store that is only read"


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


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path, exported: Path) -> None:
    (tmp_path / "folder").mkdir()
    with ChunkStore.open(tmp_path / "t") as store:
        for name in ("folder", "nothing"):
            with pytest.raises(StoreError, match="no kamera store"):
                imported(store, tmp_path / name)
        assert store.ls() == []
    with ChunkStore.open(exported) as store, pytest.raises(StoreError, match="not empty"):
        StoreAdmin(store).copy(tmp_path)


@pytest.fixture(scope="module")
def sound() -> bytes:
    return encode(coded_patch(chunk=B), 1.0)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_or_cut_bytes_never_give_a_wrong_object(
    sound: bytes, exported: Path, data: st.DataObject
) -> None:
    damaged = bytearray(sound)
    damaged[data.draw(st.integers(0, len(sound) - 1))] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.none() | st.integers(0, len(sound) - 1))
    file_of(exported, coded_patch(chunk=B)).write_bytes(damaged[:end])
    with ChunkStore.open("memory://") as store:
        done = imported(store, exported, certificates=False)
        assert (done.canonicals, done.patches, len(done.refused)) == (2, 1, 1)


# -- certificates --------------------------------------------------------------------------------


def test_certificates_of_the_backbones_concerned_travel_along(tmp_path: Path) -> None:
    folder = tmp_path / "s" / "certificates"
    with ChunkStore.open(tmp_path / "s") as store:
        put(store, canonical(A))
        folder.mkdir()
        (folder / CERTIFICATE).write_text('{"verdict": "safe"}')
        (folder / f"{'0' * 16}-32.json").write_text("of another backbone")
        (folder / f"{CONTEXT.fingerprint[:16]}-link.json").symlink_to(folder / CERTIFICATE)
        assert StoreAdmin(store).copy(tmp_path / "b").certificates == 1
        assert StoreAdmin(store).copy(tmp_path / "none", certificates=False).certificates == 0
    with ChunkStore.open(tmp_path / "t", tenant="acme", secret=SECRET) as store:
        assert imported(store, tmp_path / "b", certificates=False).certificates == 0
        assert imported(store, tmp_path / "b").certificates == 1
        assert imported(store, tmp_path / "b").certificates == 0
        own = certificate_folders(store)[0] / CERTIFICATE
        assert own.read_text() == '{"verdict": "safe"}'
        assert stat.S_IMODE(own.stat().st_mode) == 0o600
        own.write_text('{"verdict": "unsafe"}')
        done = imported(store, tmp_path / "b")
        assert own.read_text() == '{"verdict": "unsafe"}' and CERTIFICATE in done.refused[0]
    assert not (tmp_path / "t" / "certificates").exists()  # not for the other tenants
    with ChunkStore.open("memory://") as store:
        done = imported(store, tmp_path / "b")
        assert done.canonicals == 1 and "no folder" in done.refused[0]


def test_a_store_names_its_certificate_folders_its_own_first(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s") as store:
        assert certificate_folders(store) == (tmp_path / "s" / "certificates",)
    with ChunkStore.open(tmp_path / "s", secret=SECRET) as store:
        own, shared = certificate_folders(store)
        assert shared == tmp_path / "s" / "certificates" and own.is_relative_to(tmp_path / "s" / "tenants")
    with ChunkStore.open("memory://") as store:
        assert certificate_folders(store) == ()
    assert os.listdir(tmp_path) == ["s"]
