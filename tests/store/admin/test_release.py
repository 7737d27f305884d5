"""Copies in a directory's quarantine: put back when every byte is right, else they stay and say why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import CorruptChunk, StoreError
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.codec import Codec
from tests.store.builders import CONTEXT, assert_same, canonical

CHUNK = "c" * 64
SECRET, OLD, NEW = b"s" * 32, b"o" * 32, b"n" * 32


def misread(store: ChunkStore, monkeypatch: pytest.MonkeyPatch, codec: type[Codec] = Codec) -> str:
    """Have a good object set aside by one bad read; the copy's file."""

    def bad(self: Codec, data: Any, name: str, source: str) -> Any:
        raise CorruptChunk(f"{source}: a bad bit on the way")

    with monkeypatch.context() as patched:
        patched.setattr(codec, "open", bad)
        with pytest.raises(CorruptChunk, match="a bad bit"):
            store.get_canonical(replace(CONTEXT, tenant=store.tenant), CHUNK)
    [copy] = StoreAdmin(store).quarantine.copies()
    return copy.file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with ChunkStore.open(tmp_path / "s") as store:
        store.put(canonical())
    return tmp_path / "s"


def test_a_sound_copy_is_an_object_again_for_every_process(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root, memory_limit=0) as store, ChunkStore.open(root) as other:
        before = store.ls()
        file = misread(store, monkeypatch)
        assert store.ls() == [] and other.get_canonical(CONTEXT, CHUNK) is None
        assert StoreAdmin(store).quarantine.judge(file).sound
        assert StoreAdmin(store).quarantine.release(file).released
        assert_same(other.get_canonical(CONTEXT, CHUNK), canonical())
        assert store.ls() == before == other.ls()
        assert StoreAdmin(store).quarantine.copies() == [] and not list((root / "quarantine").iterdir())
        assert StoreAdmin(store).verify().ok == 1


def test_what_stands_in_its_place_is_never_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = canonical(info={"newer": True})
    with ChunkStore.open(root, memory_limit=0) as store:
        file = misread(store, monkeypatch)
        store.put(newer)
        done = StoreAdmin(store).quarantine.release(file)
        assert (done.sound, done.released) == (True, False) and "stands in its place" in done.reason
        assert_same(store.get_canonical(CONTEXT, CHUNK), newer)
        assert [copy.file for copy in StoreAdmin(store).quarantine.copies()] == [file]


def test_a_copy_of_another_tenant_stays_for_that_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ChunkStore.open(tmp_path / "s", tenant="acme", memory_limit=0) as acme:
        context = replace(CONTEXT, tenant="acme")
        acme.put(canonical(context=context))
        file = misread(acme, monkeypatch)
        with ChunkStore.open(tmp_path / "s") as other:
            done = StoreAdmin(other).quarantine.release(file)
            assert not done.released and "'acme'" in done.reason
        assert StoreAdmin(acme).quarantine.release(file).released
        assert_same(acme.get_canonical(context, CHUNK), canonical(context=context))


def test_an_encrypted_copy_needs_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encryption = pytest.importorskip("kamera.store.seal.encryption")
    options: dict[str, Any] = {"secret": SECRET, "memory_limit": 0}
    with ChunkStore.open(tmp_path / "s", keys=[OLD], **options) as store:
        store.put(canonical())
        file = misread(store, monkeypatch, encryption.Encrypted)
    with ChunkStore.open(tmp_path / "s", keys=[NEW], **options) as store:
        done = StoreAdmin(store).quarantine.release(file)
        assert (done.sound, done.released) == (False, False) and "keys=" in done.reason
    with ChunkStore.open(tmp_path / "s", keys=[NEW, OLD], **options) as store:
        assert StoreAdmin(store).quarantine.release(file).released
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


def test_no_path_comes_from_a_name_and_no_link_is_followed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        file = misread(store, monkeypatch)
        for name in ("", "..", "../objects", file + "x", f"/{file}", f"remote/{file}"):
            with pytest.raises(StoreError, match="no copy"):
                StoreAdmin(store).quarantine.release(name)
        copy = root / "quarantine" / file
        copy.rename(tmp_path / "elsewhere")
        copy.symlink_to(tmp_path / "elsewhere")
        done = StoreAdmin(store).quarantine.release(file)
        assert not done.released and "link" in done.reason and store.ls() == []


@pytest.mark.parametrize("place", [0, 40, 130, -1])
def test_a_byte_that_is_wrong_keeps_it_where_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        file = misread(store, monkeypatch)
        copy = root / "quarantine" / file
        data = bytearray(copy.read_bytes())
        data[place] ^= 1
        copy.write_bytes(data)
        done = StoreAdmin(store).quarantine.release(file)
        assert not (done.sound or done.released) and done.reason
        assert store.get_canonical(CONTEXT, CHUNK) is None and copy.read_bytes() == data
