"""Sealed and encrypted objects: only the secret's holder can name, write or read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kamera.errors import CorruptChunk, ForeignObject, StoreError, StoreVersionError, WrongKey
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.crypt import Sealed, codec_of
from kamera.store.format import Source
from tests.store.builders import CONTEXT, assert_same, canonical, encode, patch, records

SECRET = b"a secret of acme, 32 bytes long!"
OLD, NEW, STRAY = (bytes([i]) * 32 for i in (1, 2, 3))
ACME = replace(CONTEXT, tenant="acme")
CHUNK = "c" * 64
SEALED: Any = codec_of("acme", SECRET, ())
ENCRYPTED: Any = codec_of("acme", SECRET, [OLD])
CODECS = pytest.mark.parametrize("codec", [SEALED, ENCRYPTED], ids=["sealed", "encrypted"])


def opened(root: Path, *keys: bytes, **changed: Any) -> ChunkStore:
    options: dict[str, Any] = {"tenant": "acme", "secret": SECRET, "memory_limit": 0, **changed}
    return ChunkStore.open(root, keys=keys, **options)


def folder_of(root: Path) -> Path:
    [folder] = (root / "tenants").iterdir()
    return folder


def objects_of(root: Path) -> dict[str, Path]:
    return {path.stem: path for path in folder_of(root).glob("objects/*")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.few(1)
@CODECS
@settings(max_examples=30, deadline=None)
@given(record=records)
def test_every_record_survives_the_codec(codec: Sealed, record: Any) -> None:
    name = codec.name(record.key)
    data = codec.encode(record, 7.5)
    assert_same(codec.decode(data, name, "here"), record)
    info = codec.read_info(Source.of(data), name, "here")
    assert info == codec.describe(record, 7.5, len(data))
    assert (info.key, info.bytes, info.context) == (name, len(data), record.context)


@pytest.mark.few(1)
@CODECS
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_refused(codec: Sealed, data: st.DataObject) -> None:
    sound = codec.encode(patch(context=ACME), 1.0)
    damaged = bytearray(sound)
    damaged[data.draw(st.integers(0, len(sound) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptChunk):
        codec.decode(bytes(damaged), codec.name(patch(context=ACME).key), "here")


@CODECS
def test_an_object_under_the_name_of_another_is_refused(codec: Sealed) -> None:
    data = codec.encode(patch(context=ACME), 1.0)
    other = codec.name(canonical(context=ACME).key)
    with pytest.raises(CorruptChunk):
        codec.decode(data, other, "here")
    with pytest.raises(CorruptChunk):
        codec.read_info(Source.of(data), other, "here")


def test_nobody_without_the_secret_can_name_an_object(tmp_path: Path) -> None:
    key = canonical(context=ACME).key
    owners = [("acme", SECRET), ("beta", SECRET), ("acme", b"another secret, also long enough")]
    for tenant, secret in owners:
        ChunkStore.open(tmp_path, tenant=tenant, secret=secret).close()
    assert len({key, *(codec_of(*owner, ()).name(key) for owner in owners)}) == 4
    assert len(list((tmp_path / "tenants").iterdir())) == 3
    assert codec_of("acme", SECRET.decode(), ()).name(key) == SEALED.name(key)  # text is its UTF-8


@pytest.mark.parametrize("keys", [(), (OLD,)], ids=["sealed", "encrypted"])
def test_an_object_without_the_secret_is_foreign(root: Path, keys: Any) -> None:
    with opened(root, *keys) as store:
        name = store.put(canonical(context=ACME))
        objects_of(root)[name].write_bytes(encode(canonical(context=ACME, seed=5), 1.0))
        with pytest.raises(ForeignObject, match=r"without this store's secret.*quarantine"):
            store.get_canonical(ACME, CHUNK)
        assert store.get_canonical(ACME, CHUNK) is None
        store.put(canonical(context=ACME))
        assert_same(store.get_canonical(ACME, CHUNK), canonical(context=ACME))


@pytest.mark.parametrize("keys", [(), (OLD,)], ids=["sealed", "encrypted"])
def test_an_object_written_with_another_secret_is_refused(root: Path, keys: Any) -> None:
    with opened(root, *keys) as store:
        name = store.put(canonical(context=ACME))
        secret = b"another secret, also long enough"
        stranger = codec_of("acme", secret, keys)
        objects_of(root)[name].write_bytes(stranger.encode(canonical(context=ACME, seed=5), 1.0))
        with pytest.raises(CorruptChunk):
            store.get_canonical(ACME, CHUNK)
        assert store.get_canonical(ACME, CHUNK) is None


def test_another_key_is_refused_by_name_and_the_object_stays(root: Path) -> None:
    with opened(root, OLD) as store:
        name = store.put(canonical(context=ACME))
    with opened(root, STRAY, NEW) as store:
        assert [info.chunk_id for info in store.ls()] == [CHUNK]
        for _ in range(2):
            with pytest.raises(WrongKey, match="keys="):
                store.get_canonical(ACME, CHUNK)
        report = StoreAdmin(store).verify()
        assert (report.ok, report.quarantined, len(report.refused)) == (0, (), 1)
        assert store.put(canonical(context=ACME)) == name  # it may be sound: left alone
    with opened(root, OLD) as store:
        assert_same(store.get_canonical(ACME, CHUNK), canonical(context=ACME))


def test_an_encrypted_object_is_nowhere_in_the_clear(root: Path) -> None:
    chunk, behind = "d" * 64, "e" * 64
    record = canonical(chunk, ACME, tokens=40, info={"label": "a red door, 4 pm"})
    fixed = patch(chunk, ACME, antecedents=(behind,))
    with opened(root, OLD) as store:
        store.put(record)
        store.put(fixed)
        assert {info.chunk_id for info in store.ls()} == {chunk}
        assert [info.antecedents for info in store.ls("exact")] == [(behind,)]
    held = b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())
    kv = record.kv[0]["k"].contiguous().view(-1).view(dtype=record.input_ids.dtype).numpy().tobytes()
    ids = [chunk, behind, ACME.fingerprint, ACME.anchor, record.key, fixed.key]
    for secret in [
        *(i.encode() for i in ids),
        *(bytes.fromhex(i) for i in ids),
        kv[:64],
        b"red door",
        b"acme",
    ]:
        assert secret not in held
    assert len(held) > 3000 and SEALED.name(record.key).encode() in held  # it was really looked at


def test_a_sealed_directory_opens_only_as_it_was_made(tmp_path: Path) -> None:
    for root, keys in ((tmp_path / "a", ()), (tmp_path / "b", (OLD,))):
        with opened(root, *keys) as store:
            store.put(canonical(context=ACME))
        before = {path: path.read_bytes() for path in root.rglob("*.*")}
        with pytest.raises(StoreError, match="open it as it was made"):
            opened(root, *(() if keys else (OLD,)))
        with pytest.raises(StoreVersionError, match="secret"):
            ChunkStore.open(folder_of(root))
        assert {path: path.read_bytes() for path in root.rglob("*.*")} == before


@pytest.mark.parametrize(
    "options, message",
    [
        ({"secret": b"fifteen bytes.."}, "at least 16 bytes"),
        ({"secret": ""}, "at least 16 bytes"),
        ({"secret": 12345678901234567}, "at least 16 bytes"),
        ({"keys": [OLD]}, "secret="),
        ({"secret": SECRET, "keys": [OLD, b"short"]}, "32 bytes"),
        ({"secret": SECRET, "keys": ["k" * 32]}, "32 bytes"),
        ({"secret": SECRET, "keys": [OLD, OLD]}, "differ"),
    ],
)
def test_unusable_secrets_and_keys_are_never_shown(root: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ChunkStore.open(root, tenant="acme", **options)
    assert "fifteen" not in str(caught.value) and "short" not in str(caught.value)
    assert not root.exists()
