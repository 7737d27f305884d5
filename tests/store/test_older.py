"""Objects of formats 1 to 3, and directories of them: read as ever, no longer written."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from kamera.errors import CorruptChunk, ForeignObject, StoreError, WrongKey
from kamera.store import ChunkStore
from kamera.store.format import decode, encode
from kamera.store.records import kept
from kamera.store.seal.codec import Sealed
from kamera.store.seal.encryption import Encrypted
from lab.reliability import rig
from lab.reliability.forge import join_older, split

from .builders import CONTEXT, assert_same, canonical, coded_patch, older, patch, records

CHUNK = "c" * 64
ACME = replace(CONTEXT, tenant="acme")
SECRET = b"a secret of acme, 32 bytes long!"
KEY = b"k" * 32
SEALED = Sealed.of("acme", SECRET)
ENCRYPTED = Encrypted.under("acme", SECRET, [KEY])


def read(data: bytes, key: str) -> Any:
    return decode(data, key, "here")


@pytest.mark.parametrize(
    "slot, digest",
    [
        (0, "bc7bdb05ab8a5a9ef3bcdbb082f235c2ae1eb0da06dc85d8941a4ae343bf0d4b"),
        (2, "7b700e152be59e6e308eb9c101b123c0fcaa186604bebe2b672316554c938e85"),
    ],
)
def test_these_are_the_files_that_earlier_versions_wrote(slot: int, digest: str) -> None:
    data = older(rig.record(slot, 7), 7)
    assert data[35:99].decode() == digest
    assert_same(read(data, rig.record(slot, 7).key), rig.record(slot, 7))


@settings(deadline=None, max_examples=60)
@given(records)
def test_every_record_comes_back_bit_for_bit(record: Any) -> None:
    data = older(record, 1.5)
    assert split(data)[1]["format"] == record.format < 4
    assert_same(read(data, record.key), record)


def test_codes_come_back_too() -> None:
    numbers = torch.randn(2, 5, 70, generator=torch.Generator().manual_seed(1)).bfloat16()
    record = kept(canonical(context=replace(CONTEXT, kv="int4"), tokens=5, kv=({"k": numbers},)))
    for one, version in ((record, 3), (coded_patch(), 2)):
        data = older(one, 7)
        assert split(data)[1]["format"] == version
        assert_same(read(data, one.key), one)


@pytest.mark.parametrize("record", [canonical(), patch()])
def test_every_flipped_byte_and_every_truncation_is_refused(record: Any) -> None:
    data = older(record, 7)
    for place in range(len(data)):
        bad = bytearray(data)
        bad[place] ^= 0x20
        with pytest.raises(CorruptChunk):
            read(bytes(bad), record.key)
        with pytest.raises(CorruptChunk):
            read(data[:place], record.key)


def test_a_file_that_says_another_version_than_it_is_laid_out_in_is_refused() -> None:
    outer, header, rest = split(encode(canonical(), 7))
    with pytest.raises(CorruptChunk, match="of format 4, but not laid out"):
        read(join_older(outer, header, rest), canonical().key)
    outer, header, rest = split(older(coded_patch(), 7))
    with pytest.raises(CorruptChunk, match=r"\['format'\] disagree"):
        read(join_older(outer, header | {"format": 1}, rest), coded_patch().key)


def test_a_directory_of_an_earlier_version_is_read_and_marked_when_it_is_written_to(tmp_path: Path) -> None:
    root = tmp_path / "s"
    ChunkStore.open(root).close()
    marker = root / "kamera-store.json"
    marker.write_text('{"format": 1}')
    path = root / "objects" / canonical().key[:2] / f"{canonical().key}.safetensors"
    path.parent.mkdir()
    path.write_bytes(older(canonical(), 7.0))
    with ChunkStore.open(root) as store:
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
        layer = store.read_layer(CONTEXT, CHUNK, 0)
        assert layer is not None and layer.keys() == {"k", "v"}
        assert store.verify().ok == 1
        assert marker.read_text() == '{"format": 1}'  # whoever made it can go on
        store.put_canonical(canonical())
        assert marker.read_text() == '{"format": 1}'  # it was there
        store.put_patch(patch())
        assert json.loads(marker.read_text()) == {"format": 3}
    with ChunkStore.open(root) as store:
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())
        assert_same(store.get_patch(CONTEXT, CHUNK, ("x", "y")), patch())


def test_a_marker_that_a_newer_version_put_there_meanwhile_stays(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path / "s") as store:
        (tmp_path / "s" / "kamera-store.json").write_text('{"format": 9}')
        store.put_patch(patch())
        assert (tmp_path / "s" / "kamera-store.json").read_text() == '{"format": 9}'


def test_a_marker_that_cannot_be_raised_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "s"
    ChunkStore.open(root).close()
    (root / "kamera-store.json").write_text('{"format": 1}')
    real = os.replace

    def fails(source: str, target: str, **named: Any) -> None:
        if target == "kamera-store.json":
            raise OSError(28, "No space left on device")
        real(source, target, **named)

    with ChunkStore.open(root) as store:
        monkeypatch.setattr(os, "replace", fails)
        with pytest.raises(StoreError, match="No space"):
            store.put_patch(patch())
        monkeypatch.undo()
        assert store.ls() == [] and (root / "kamera-store.json").read_text() == '{"format": 1}'
        store.put_patch(patch())
        assert len(store.ls()) == 1


def sealed(record: Any, created: float) -> bytes:
    """What `Sealed` wrote: the same file, its digest keyed."""
    data = older(record, created)
    blank = data[:35] + b"0" * 64 + data[99:]
    digest = hashlib.blake2b(blank, digest_size=32, key=SEALED.key_for("kamera.digest.v1", 64))
    return data[:35] + digest.hexdigest().encode() + data[99:]


def halves(record: Any, created: float) -> bytes:
    """What `Encrypted` wrote: head and tensors under two random nonces."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    plain = sealed(record, created)
    cut = 8 + int.from_bytes(plain[:8], "little")
    [(key_id, key)] = ENCRYPTED.keys.items()
    nonces = os.urandom(12), os.urandom(12)
    start = b"KAMERA\x00\x01" + key_id + nonces[0] + nonces[1] + (cut + 16).to_bytes(8, "little")
    mac = ENCRYPTED.key_for("kamera.preamble.v1")
    check = hashlib.blake2b(ENCRYPTED.name(record.key).encode() + start, key=mac, digest_size=32).digest()
    preamble = start + check
    head = AESGCM(key).encrypt(nonces[0], plain[:cut], preamble + b"head")
    return preamble + head + AESGCM(key).encrypt(nonces[1], plain[cut:], preamble + b"tensors")


@pytest.mark.parametrize("codec, write", [(SEALED, sealed), (ENCRYPTED, halves)], ids=["sealed", "encrypted"])
def test_sealed_and_encrypted_objects_of_earlier_versions_are_read(codec: Sealed, write: Any) -> None:
    record = canonical(context=ACME)
    name = codec.name(record.key)
    data = write(record, 7.0)
    assert_same(codec.decode(data, name, "here"), record)
    for place in range(0, len(data), 11):
        with pytest.raises(CorruptChunk):
            codec.decode(data[:place] + bytes([data[place] ^ 2]) + data[place + 1 :], name, "here")
        with pytest.raises(CorruptChunk):
            codec.decode(data[:place], name, "here")
    with pytest.raises(ForeignObject):
        SEALED.decode(older(record, 7.0), name, "here")
    with pytest.raises(WrongKey):
        (SEALED if codec is ENCRYPTED else ENCRYPTED).decode(data, name, "here")


@pytest.mark.parametrize("write, keys", [(sealed, ()), (halves, (KEY,))], ids=["sealed", "encrypted"])
def test_their_directories_are_read_and_rotated(write: Any, keys: tuple[bytes, ...], tmp_path: Path) -> None:
    record = canonical(context=ACME)

    def opened(*keys: bytes) -> ChunkStore:
        return ChunkStore.open(tmp_path / "s", tenant="acme", secret=SECRET, keys=keys, memory_limit=0)

    opened(*keys).close()
    [folder] = (tmp_path / "s" / "tenants").iterdir()
    (tmp_path / "s" / "kamera-store.json").write_text('{"format": 1}')
    kind = "encrypted" if keys else "digests"
    (folder / "kamera-store.json").write_text(json.dumps({"format": 2, "sealed": kind}))
    path = folder / "objects" / SEALED.name(record.key)[:2] / f"{SEALED.name(record.key)}.safetensors"
    path.parent.mkdir()
    path.write_bytes(write(record, 7.0))
    with opened(*keys) as store:
        assert_same(store.get_canonical(ACME, CHUNK), record)
        stream = store.open_canonical(ACME, CHUNK)
        assert stream is not None and len(list(stream)) == 2
        assert [info.created for info in store.ls()] == [7.0]
        store.put_patch(patch(context=ACME))
    assert json.loads((folder / "kamera-store.json").read_text()) == {"format": 4, "sealed": kind}
    if keys:
        with opened(b"n" * 32, KEY) as store:
            assert (store.rotate().rewritten, store.verify().ok) == (2, 2)
        assert path.read_bytes()[:8] == b"KAMERA\x00\x02"
        with opened(b"n" * 32) as store:
            assert_same(store.get_canonical(ACME, CHUNK), record)
            assert store.ls()[0].created == 7.0
