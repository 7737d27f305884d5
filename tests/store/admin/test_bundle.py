"""Bundles: what comes out of one is what went in, and nothing else gets in."""

from __future__ import annotations

import os
import stat
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kamera import files as files_module
from kamera.errors import CorruptChunk, KameraError, StoreError, StoreVersionError, UnknownChunk
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
def bundle(tmp_path: Path) -> Path:
    """Of two canonicals and a patch, and a certificate."""
    path = tmp_path / "bundle.kamera"
    with ChunkStore.open(tmp_path / "source") as store:
        for record in (canonical(A), canonical(B), patch(B, antecedents=(A,))):
            put(store, record)
        (tmp_path / "source" / "certificates").mkdir()
        (tmp_path / "source" / "certificates" / CERTIFICATE).write_text('{"a": 1}')
        StoreAdmin(store).export_bundle(path)
    return path


def rewritten(bundle: Path, change: Callable[[str, bytes], tuple[Any, bytes] | None], *extra: Any) -> Path:
    """The same zip with members changed, left out (None) and added: a `ZipInfo` or name, and bytes."""
    target = bundle.with_name("changed.kamera")
    with (
        zipfile.ZipFile(bundle) as old,
        zipfile.ZipFile(target, "w") as new,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # of a name that is there twice
        for info in old.infolist():
            member = change(info.filename, old.read(info))
            if member is not None:
                new.writestr(*member)
        for member in extra:
            new.writestr(*member)
        new.comment = old.comment
    return target


def keep(name: str, data: bytes) -> tuple[str, bytes]:
    return name, data


def with_member(bundle: Path, name: str, data: bytes) -> Path:
    """With other bytes for a member, which the zip's checksum fits."""
    return rewritten(bundle, lambda n, d: None if n == name else (n, d), (name, data))


def name_of(record: Any) -> str:
    return f"objects/{record.key}.safetensors"


@stores
@pytest.mark.parametrize("into", STORES.values(), ids=STORES)
def test_a_store_of_any_kind_comes_back_in_one_of_any_kind(
    tmp_path: Path, options: dict[str, Any], into: dict[str, Any]
) -> None:
    path = tmp_path / "bundle.kamera"
    with ChunkStore.open(tmp_path / "source", **options) as source:
        for record in records(source.tenant):
            put(source, record)
        done = StoreAdmin(source).export_bundle(path)
        assert (done.canonicals, done.patches, done.refused) == (3, 3, ())
        assert done.bytes == path.stat().st_size
    with ChunkStore.open(tmp_path / "target", **into) as target:
        done = StoreAdmin(target).import_bundle(path)
        assert (done.canonicals, done.patches, done.present, done.refused) == (3, 3, 0, ())
        assert_holds(target, records(target.tenant))
        assert StoreAdmin(target).import_bundle(path).present == 6


def test_a_bundle_tells_nothing_of_tenant_secret_or_key(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s", tenant="acme corp", secret=SECRET, keys=[KEY]) as store:
        name = store.put(canonical(A, replace(CONTEXT, tenant="acme corp")))
        StoreAdmin(store).export_bundle(tmp_path / "b")
    held = (tmp_path / "b").read_bytes()
    assert A.encode() in held
    for hidden in (b"acme corp", name.encode(), SECRET, KEY):
        assert hidden not in held


def test_equal_objects_give_equal_bytes_for_the_owner_alone(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s") as store:
        for record in records():
            put(store, record)
        for name in ("one", "two"):
            StoreAdmin(store).export_bundle(tmp_path / name)
        (tmp_path / "two").write_bytes(b"what was there is replaced")
        StoreAdmin(store).export_bundle(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {"s", "one", "two"}


def test_chosen_chunks_take_along_the_patches_that_need_no_other(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with ChunkStore.open(tmp_path / "s") as store:
        for record in records():
            put(store, record)
        done = StoreAdmin(store).export_bundle(
            tmp_path / "b", [A, B], progress=lambda *counts: told.append(counts)
        )
        assert (done.canonicals, done.patches) == (3, 2)  # not the one behind c
        done = StoreAdmin(store).export_bundle(tmp_path / "b", [B])
        assert (done.canonicals, done.patches) == (1, 0)
        with pytest.raises(UnknownChunk, match="nothing was exported"):
            StoreAdmin(store).export_bundle(tmp_path / "none", [A, C])
    assert told == [(i, 5) for i in range(1, 6)]
    assert not (tmp_path / "none").exists()


def test_a_bundle_that_could_not_be_finished_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with ChunkStore.open(tmp_path / "s") as store:
        put(store, canonical(A))
        for call in ("replace", "fsync"):
            with monkeypatch.context() as patched:
                patched.setattr(files_module.os, call, fails)
                with pytest.raises(StoreError, match="No space left"):
                    StoreAdmin(store).export_bundle(tmp_path / "b")
        with pytest.raises(StoreError, match="cannot write"):
            StoreAdmin(store).export_bundle(tmp_path / "nowhere" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_an_object_that_is_damaged_is_left_out_and_said_so(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s", memory_limit=0) as store:
        names = [put(store, record) for record in records()]
        [file] = (tmp_path / "s").rglob(f"{names[0]}.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        done = StoreAdmin(store).export_bundle(tmp_path / "b")
        assert (done.canonicals, done.patches) == (2, 3)
        [line] = done.refused
        assert names[0] in line


def test_what_is_in_the_store_is_never_replaced_by_a_bundle(tmp_path: Path, bundle: Path) -> None:
    with ChunkStore.open(tmp_path / "t") as store:
        put(store, canonical(A, seed=9))
        put(store, patch(B, antecedents=(A,), rank=5, seed=9))
        done = StoreAdmin(store).import_bundle(bundle)
        assert (done.canonicals, done.patches, done.present) == (1, 0, 2)
        assert_same(store.get_canonical(CONTEXT, A), canonical(A, seed=9))
        assert_same(store.get_patch(CONTEXT, B, (A,)), patch(B, antecedents=(A,), rank=5, seed=9))


def test_a_canonical_in_codes_stays_the_same_codes(tmp_path: Path) -> None:
    context = replace(CONTEXT, kv="int8", tenant="acme")
    record = canonical(A, context, kv=({"k": torch.randn(2, 3, 4), "v": torch.randn(2, 3, 4)},))
    with ChunkStore.open(tmp_path / "s", tenant="acme", kv="int8") as store:
        store.put(record)
        held = store.get_canonical(context, A)
        StoreAdmin(store).export_bundle(tmp_path / "b")
    with ChunkStore.open(tmp_path / "t", tenant="acme", secret=SECRET, memory_limit=0) as store:
        assert StoreAdmin(store).import_bundle(tmp_path / "b").refused == ()
        assert_same(store.get_canonical(context, A), held)


# -- what must not get in ------------------------------------------------------------------------


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def compressed(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


STRAY = f"objects/{'0' * 64}.safetensors"
ADDED: dict[str, tuple[Any, bytes]] = {
    "../../escaped": ("../../escaped", b"x"),
    "/outside/escaped": ("/outside/escaped", b"x"),
    "objects/../../escaped": ("objects/../../escaped", b"x"),
    "certificates/../escaped.json": ("certificates/../escaped.json", b"x"),
    "a folder": (f"objects/{'0' * 64}.safetensors/", b""),
    "a link": (link(STRAY), b"/etc/passwd"),
    "a zip bomb": (compressed(STRAY), b"\0" * 10_000_000),
    "of another name": (STRAY, encode(canonical(C), 1.0)),
}


@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
def test_a_member_that_does_not_belong_there_is_refused_and_the_rest_is_imported(
    tmp_path: Path, bundle: Path, added: Any
) -> None:
    before = {path for path in tmp_path.rglob("*")}
    changed = rewritten(bundle, keep, added)
    with ChunkStore.open(tmp_path / "t") as store:
        done = StoreAdmin(store).import_bundle(changed)
        assert (done.canonicals, done.patches, done.certificates) == (2, 1, 1)
        [line] = done.refused
        assert repr(getattr(added[0], "filename", added[0])) in line
        assert len(store.ls()) == 3
    made = {path for path in tmp_path.rglob("*")} - before - {changed}
    assert all(path.is_relative_to(tmp_path / "t") for path in made)
    assert not any("escaped" in path.name for path in made)


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
def test_an_invalid_object_is_refused_whatever_the_zip_says(
    tmp_path: Path, bundle: Path, data: bytes, message: str
) -> None:
    with ChunkStore.open(tmp_path / "t") as store:
        done = StoreAdmin(store).import_bundle(with_member(bundle, name_of(canonical(B)), data))
        assert (done.canonicals, done.patches) == (1, 1)
        [line] = done.refused
        assert name_of(canonical(B)) in line and message in line
        assert store.get_canonical(CONTEXT, B) is None


def test_an_object_of_a_tenant_is_foreign(tmp_path: Path, bundle: Path) -> None:
    record = canonical(C, replace(CONTEXT, tenant="acme"))
    for tenant in ("", "acme"):
        with ChunkStore.open(tmp_path / f"t{tenant}", tenant=tenant) as store:
            done = StoreAdmin(store).import_bundle(with_member(bundle, name_of(record), encode(record, 1.0)))
            assert done.canonicals == 2
            assert "foreign" in done.refused[0] and len(done.refused) == 1


def test_a_member_that_is_there_twice_is_refused(tmp_path: Path, bundle: Path) -> None:
    name = name_of(canonical(B))
    changed = rewritten(bundle, keep, (name, encode(canonical(B, seed=9), 1.0)))
    with ChunkStore.open(tmp_path / "t") as store:
        done = StoreAdmin(store).import_bundle(changed)
        assert (done.canonicals, len(done.refused)) == (1, 1)
        assert "more than one" in done.refused[0]


def test_a_member_that_is_missing_is_told(tmp_path: Path, bundle: Path) -> None:
    changed = rewritten(bundle, lambda n, d: None if n == name_of(canonical(B)) else (n, d))
    with ChunkStore.open(tmp_path / "t") as store:
        done = StoreAdmin(store).import_bundle(changed)
        assert (done.canonicals, done.patches) == (1, 1)
        assert done.refused == ("'members': 1 are missing",)


def test_a_certificate_that_was_damaged_is_refused(tmp_path: Path, bundle: Path) -> None:
    data = bundle.read_bytes()
    assert data.count(b'{"a": 1}') == 1
    bundle.write_bytes(data.replace(b'{"a": 1}', b'{"a": 2}'))
    with ChunkStore.open(tmp_path / "t") as store:
        done = StoreAdmin(store).import_bundle(bundle)
        assert (done.canonicals, done.patches, done.certificates) == (2, 1, 0)
        [line] = done.refused
        assert CERTIFICATE in line and "damaged" in line


def test_a_member_that_claims_too_many_bytes_is_refused(tmp_path: Path, bundle: Path) -> None:
    name = name_of(canonical(B)).encode()
    data = bytearray(bundle.read_bytes())
    entry = data.rindex(name) - 46  # of the central directory: both sizes
    data[entry + 20 : entry + 28] = (2**31 - 1).to_bytes(4, "little") * 2
    bundle.write_bytes(data)
    with ChunkStore.open(tmp_path / "t") as store:
        done = StoreAdmin(store).import_bundle(bundle)
        assert done.canonicals == 1 and "more than there are" in done.refused[0]


COMMENTS: dict[str, tuple[bytes, type[KameraError], str]] = {
    "of another format": (b"kamera bundle 3, 4 members", StoreVersionError, "format 3"),
    "without a format": (b"", CorruptChunk, "no bundle"),
    "of another program": (b"holiday pictures", CorruptChunk, "no bundle"),
}


@pytest.mark.parametrize("comment, error, message", COMMENTS.values(), ids=COMMENTS)
def test_a_zip_that_is_no_bundle_of_this_format_is_refused_whole(
    tmp_path: Path, bundle: Path, comment: bytes, error: type[KameraError], message: str
) -> None:
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.comment = comment
    with ChunkStore.open(tmp_path / "t") as store:
        with pytest.raises(error, match=message):
            StoreAdmin(store).import_bundle(bundle)
        assert store.ls() == []


def test_what_is_no_bundle_is_refused(tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "text").write_text("no zip at all")
    (tmp_path / "half").write_bytes(bundle.read_bytes()[: bundle.stat().st_size // 2])
    with ChunkStore.open(tmp_path / "t") as store:
        for path in (tmp_path / "text", tmp_path / "half"):
            with pytest.raises(CorruptChunk):
                StoreAdmin(store).import_bundle(path)
        with pytest.raises(StoreError, match="cannot read"):
            StoreAdmin(store).import_bundle(tmp_path / "nothing")
        assert store.ls() == []


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("sound")
    with ChunkStore.open("memory://") as store:
        for record in (patch(A), coded_patch(chunk=B)):
            put(store, record)
        StoreAdmin(store).export_bundle(folder / "b")
    return (folder / "b").read_bytes()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_or_cut_bytes_never_give_a_wrong_object(
    sound: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    damaged = bytearray(sound)
    damaged[data.draw(st.integers(0, len(sound) - 1))] ^= data.draw(st.integers(1, 255))
    end = data.draw(st.none() | st.integers(0, len(sound)))
    (tmp_path / "b").write_bytes(damaged[:end])
    wanted = {record.key: record for record in (patch(A), coded_patch(chunk=B))}
    with ChunkStore.open("memory://") as store:
        try:
            done = StoreAdmin(store).import_bundle(tmp_path / "b")
        except KameraError:
            assert store.ls() == []
            return
        listed = store.ls()
        # two changes in the zip's own fields may cancel out; what came in is what went in all the same
        assert len(listed) == done.patches and len(listed) + len(done.refused) >= 2
        for info in listed:
            got = store.get_patch(info.context, info.chunk_id, info.antecedents, info.kind)
            assert_same(got, wanted[info.key])


# -- certificates --------------------------------------------------------------------------------


def test_certificates_of_the_backbones_concerned_travel_along(tmp_path: Path) -> None:
    folder = tmp_path / "s" / "certificates"
    with ChunkStore.open(tmp_path / "s") as store:
        put(store, canonical(A))
        folder.mkdir()
        (folder / CERTIFICATE).write_text('{"verdict": "safe"}')
        (folder / f"{'0' * 16}-32.json").write_text("of another backbone")
        (folder / f"{CONTEXT.fingerprint[:16]}-link.json").symlink_to(folder / CERTIFICATE)
        assert StoreAdmin(store).export_bundle(tmp_path / "b").certificates == 1
        assert StoreAdmin(store).export_bundle(tmp_path / "none", certificates=False).certificates == 0
    with ChunkStore.open(tmp_path / "t", tenant="acme", secret=SECRET) as store:
        assert StoreAdmin(store).import_bundle(tmp_path / "b", certificates=False).certificates == 0
        assert StoreAdmin(store).import_bundle(tmp_path / "b").certificates == 1
        assert StoreAdmin(store).import_bundle(tmp_path / "b").certificates == 0
        own = certificate_folders(store)[0] / CERTIFICATE
        assert own.read_text() == '{"verdict": "safe"}'
        assert stat.S_IMODE(own.stat().st_mode) == 0o600
        own.write_text('{"verdict": "unsafe"}')
        done = StoreAdmin(store).import_bundle(tmp_path / "b")
        assert own.read_text() == '{"verdict": "unsafe"}' and CERTIFICATE in done.refused[0]
    assert not (tmp_path / "t" / "certificates").exists()  # not for the other tenants
    with ChunkStore.open("memory://") as store:
        done = StoreAdmin(store).import_bundle(tmp_path / "b")
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
