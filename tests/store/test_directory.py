"""A store in a directory: what is written is there, whole; what is no store or damaged is refused by name."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import CorruptChunk, StoreError, StoreFull, StoreVersionError
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.format import FORMAT_VERSION
from tests.store.builders import (
    CHUNK,
    CONTEXT,
    assert_same,
    canonical,
    decode,
    drop_index,
    encode,
    file_of,
    flip,
    join,
    patch,
    snapshot,
    split,
)

KEY = canonical().key


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_files_and_folders_are_the_owners_alone(root: Path) -> None:
    old = os.umask(0)
    try:
        with ChunkStore.open(root) as store:
            key = store.put(canonical())
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in [root, *root.rglob("*")]}
    finally:
        os.umask(old)
    assert {m for n, m in modes.items() if "." in n} == {0o600}
    assert {m for n, m in modes.items() if "." not in n} == {0o700}
    assert_same(decode(file_of(root, key).read_bytes(), key, "here"), canonical())


def test_a_canonical_that_is_there_is_not_written_again(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put(canonical(seed=1))
        before = file_of(root, key).stat()
        assert store.put(canonical(seed=2)) == key
        after = file_of(root, key).stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical(seed=1))


@pytest.mark.few(5)
@pytest.mark.parametrize("call", ["replace", "fsync", "write"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_is_interrupted_leaves_the_old_object(
    root: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    with ChunkStore.open(root) as store:
        store.put(patch(rank=2))
        before = snapshot(root / "objects")
        monkeypatch.setattr(os, call, fails)
        for record in (patch(rank=7), canonical()):
            with pytest.raises((StoreError, KeyboardInterrupt)):
                store.put(record)
        monkeypatch.undo()
        assert snapshot(root / "objects") == before
        got = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert got is not None and got.patch.rank == 2
        assert store.get_canonical(CONTEXT, CHUNK) is None
        for record in (patch(rank=7), canonical()):
            store.put(record)
        assert list((root / "tmp").iterdir()) == []


def test_the_least_recently_used_leave_for_new_ones_and_pinned_ones_stay(root: Path) -> None:
    with ChunkStore.open(root) as store:
        for name in "abcd":
            store.put(canonical(name))
        StoreAdmin(store).pin([info.key for info in store.ls(chunk_id="b")])
        size = max(info.bytes for info in store.ls())
        assert store.get_canonical(CONTEXT, "a") is not None
    with ChunkStore.open(root, disk_limit=4 * size) as store:
        store.put(canonical("e"))
        assert {info.chunk_id for info in store.ls()} == {"a", "b", "d", "e"}
        with pytest.raises(StoreFull, match="over its disk_limit"):
            store.put(canonical("large", tokens=900))
        assert len(store.ls()) == 4
    with ChunkStore.open(root, disk_limit=size // 2) as store, pytest.raises(StoreFull):
        store.put(canonical("f"))


# -- what is no store ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 7, 10])
def test_a_store_of_another_format_is_refused_and_left_untouched(root: Path, version: int) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical())
    (root / "kamera-store.json").write_text(json.dumps({"format": version}))
    drop_index(root)
    before = snapshot(root)
    with pytest.raises(StoreVersionError, match=rf"format {version}.*reads 9 here"):
        ChunkStore.open(root)
    assert snapshot(root) == before


def test_what_is_no_store_is_refused_and_left_untouched(root: Path) -> None:
    root.mkdir()
    (root / "photo.jpg").write_bytes(b"jpeg")
    with pytest.raises(StoreError, match="no kamera store"):
        ChunkStore.open(root)
    assert [p.name for p in root.iterdir()] == ["photo.jpg"]
    with pytest.raises(StoreError, match="cannot open"):
        ChunkStore.open(root / "photo.jpg")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "1"}', '{"format": 0}'])
def test_a_damaged_marker_is_refused(root: Path, text: str) -> None:
    ChunkStore.open(root).close()
    (root / "kamera-store.json").write_text(text)
    with pytest.raises(StoreError, match="damaged"):
        ChunkStore.open(root)


# -- damaged, foreign and newer files --------------------------------------------------------------


def test_a_damaged_object_is_refused_quarantined_and_then_a_miss(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put(patch())
        sound, damaged = b"", []
        for _ in range(3):
            path = file_of(root, store.put(canonical()))
            sound = path.read_bytes()
            flip(path)
            damaged.append(path.read_bytes())
            with pytest.raises(CorruptChunk, match=r"digest.*quarantine"):
                store.get_canonical(CONTEXT, CHUNK)
            assert not path.exists() and store.get_canonical(CONTEXT, CHUNK) is None
            assert [i.kind for i in store.ls()] == ["exact"]
        copies = sorted((root / "quarantine").glob("*.safetensors"))
        assert [copy.read_bytes() for copy in copies] == damaged
        copies[0].rename(path)
        with pytest.raises(CorruptChunk, match="digest"):  # moved back, it is still damaged
            store.get_canonical(CONTEXT, CHUNK)
        path.write_bytes(sound)
        assert StoreAdmin(store).verify().ok == 2
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


def test_verify_reads_everything_and_sets_aside_what_is_not_the_object_of_its_name(root: Path) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        good, bad = store.put(canonical()), store.put(patch())
        flip(file_of(root, bad), 200)
        other, newer = canonical("d" * 64), patch(antecedents=("newer",))
        file_of(root, other.key).write_bytes(file_of(root, good).read_bytes())
        outer, header, rest = split(encode(newer, 7.0))
        file_of(root, newer.key).write_bytes(join(outer, header | {"format": FORMAT_VERSION + 1}, rest))
        (root / "tmp" / f"{good}.dead").write_bytes(b"half")
        (root / "objects" / "notes.safetensors").write_bytes(b"not ours")
        StoreAdmin(store).rebuild_index()
        assert [info.key for info in store.ls()] == [good]
        report = StoreAdmin(store).verify()
        assert report.ok == 1
        assert sorted(
            key for key in (bad, other.key) for line in report.quarantined if key in line
        ) == sorted((bad, other.key))
        for _ in range(2):  # it is left where it is
            assert [newer.key in line for line in StoreAdmin(store).verify().refused] == [True]
            with pytest.raises(StoreVersionError, match=f"format {FORMAT_VERSION + 1}"):
                store.get_patch(CONTEXT, CHUNK, ("newer",))


def test_a_link_under_an_objects_name_is_quarantined(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    with ChunkStore.open(root, memory_limit=0) as store:
        store.put(canonical())
        os.replace(file_of(root, KEY), elsewhere)
        file_of(root, KEY).symlink_to(elsewhere)
        intact = elsewhere.read_bytes()
        with pytest.raises(CorruptChunk, match=r"link.*quarantine"):
            store.get_canonical(CONTEXT, CHUNK)
        assert store.get_canonical(CONTEXT, CHUNK) is None
        assert [copy.bytes for copy in StoreAdmin(store).quarantined()] == [0]
        store.put(canonical())
        assert not file_of(root, KEY).is_symlink()
        assert StoreAdmin(store).drop_quarantined(KEY) == 1
        assert elsewhere.read_bytes() == intact


@pytest.mark.parametrize("key", ["", "..", "../" + KEY, KEY.upper(), KEY + "/x", "\0" * 64])
def test_no_path_is_made_of_what_is_no_name(root: Path, key: str) -> None:
    with ChunkStore.open(root) as store:
        admin = StoreAdmin(store)
        for use in (admin.load, admin.read, admin.delete, admin.drop_quarantined):
            with pytest.raises(ValueError, match=r"name|key"):
                use(key)
