"""A store in a directory: what is written is there, whole and for its owner alone."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import CorruptChunk, StoreError, StoreVersionError
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


def test_what_was_put_is_there_after_reopening(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical())
        store.put(patch())
    with ChunkStore.open(root) as store:
        got, fixed = (
            store.get_canonical(CONTEXT, CHUNK),
            store.get_patch(CONTEXT, CHUNK, ("x", "y")),
        )
        assert_same(got, canonical())
        assert_same(fixed, patch())
        assert len(store.ls()) == 2


def test_files_and_folders_are_the_owners_alone(root: Path) -> None:
    old = os.umask(0)
    try:
        with ChunkStore.open(root) as store:
            store.put(canonical())
            paths = [root, *root.rglob("*")]
            modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in paths}
    finally:
        os.umask(old)
    assert {m for n, m in modes.items() if "." in n} == {0o600}
    assert {m for n, m in modes.items() if "." not in n} == {0o700}


def test_a_canonical_that_is_there_is_not_written_again(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put(canonical(seed=1))
        before = file_of(root, key).stat()
        assert store.put(canonical(seed=2)) == key
        after = file_of(root, key).stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical(seed=1))


def test_a_directory_object_is_exactly_the_format(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put(canonical())
    assert_same(decode(file_of(root, key).read_bytes(), key, "here"), canonical())


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
        with pytest.raises((StoreError, KeyboardInterrupt)):
            store.put(patch(rank=7))
        with pytest.raises((StoreError, KeyboardInterrupt)):
            store.put(canonical())
        monkeypatch.undo()
        assert snapshot(root / "objects") == before
        got = store.get_patch(CONTEXT, CHUNK, ("x", "y"))
        assert got is not None and got.patch.rank == 2
        assert store.get_canonical(CONTEXT, CHUNK) is None
        store.put(canonical())
        store.put(patch(rank=7))
        assert list((root / "tmp").iterdir()) == []


def test_leftovers_of_dead_writers_are_ignored(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put(canonical())
    (root / "tmp" / f"{key}.1.dead").write_bytes(b"half")
    (file_of(root, key).parent / "notes.safetensors").write_bytes(b"not ours")
    drop_index(root)
    with ChunkStore.open(root) as store:
        assert [i.key for i in store.ls()] == [key]
        assert StoreAdmin(store).verify().ok == 1 and StoreAdmin(store).verify().quarantined == ()


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


def test_a_folder_that_is_no_store_is_refused_and_left_untouched(root: Path) -> None:
    root.mkdir()
    (root / "photo.jpg").write_bytes(b"jpeg")
    with pytest.raises(StoreError, match="no kamera store"):
        ChunkStore.open(root)
    assert [p.name for p in root.iterdir()] == ["photo.jpg"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "1"}', '{"format": 0}'])
def test_a_damaged_marker_is_refused(root: Path, text: str) -> None:
    ChunkStore.open(root).close()
    (root / "kamera-store.json").write_text(text)
    with pytest.raises(StoreError, match="damaged"):
        ChunkStore.open(root)


def test_a_file_where_the_store_should_be_is_refused(root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(StoreError, match="cannot open"):
        ChunkStore.open(root)


# -- damaged, foreign and newer files -----------------------------------------------------------------


def test_a_damaged_object_is_refused_quarantined_and_then_a_miss(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put(canonical())
        store.put(patch())
        path = file_of(root, key)
        flip(path)
        damaged = path.read_bytes()
        with pytest.raises(CorruptChunk, match=r"digest.*quarantine"):
            store.get_canonical(CONTEXT, CHUNK)
        assert [p.read_bytes() for p in (root / "quarantine").glob("*.safetensors")] == [damaged]
        assert not path.exists()
        assert store.get_canonical(CONTEXT, CHUNK) is None
        assert [i.kind for i in store.ls()] == ["exact"]
        store.put(canonical())
        assert_same(store.get_canonical(CONTEXT, CHUNK), canonical())


def test_quarantine_keeps_every_damaged_file(root: Path) -> None:
    with ChunkStore.open(root) as store:
        for _ in range(3):
            flip(file_of(root, store.put(canonical())))
            with pytest.raises(CorruptChunk):
                store.get_canonical(CONTEXT, CHUNK)
    assert len(list((root / "quarantine").glob("*.safetensors"))) == 3


def test_a_file_under_another_keys_name_is_refused(root: Path) -> None:
    with ChunkStore.open(root) as store:
        other = canonical("d" * 64)
        path = file_of(root, other.key)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file_of(root, store.put(canonical())).read_bytes())
        StoreAdmin(store).rebuild_index()
        assert len(store.ls()) == 1
        with pytest.raises(CorruptChunk, match="expected"):
            store.get_canonical(CONTEXT, "d" * 64)


def test_verify_reads_everything_and_quarantines_what_is_damaged(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical())
        bad = store.put(patch())
        flip(file_of(root, bad), 200)
        record = patch(antecedents=("newer",))
        outer, header, rest = split(encode(record, 7.0))
        newer = file_of(root, record.key)
        newer.parent.mkdir(exist_ok=True)
        newer.write_bytes(join(outer, header | {"format": FORMAT_VERSION + 1}, rest))
        report = StoreAdmin(store).verify()
        assert report.ok == 1
        assert [bad in line for line in report.quarantined] == [True]
        assert [record.key in line for line in report.refused] == [True]
        assert newer.exists()
        assert StoreAdmin(store).verify().quarantined == ()


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1])
def test_an_object_of_another_format_is_refused_in_place(root: Path, version: int) -> None:
    with ChunkStore.open(root) as store:
        path = file_of(root, store.put(canonical()))
        outer, header, rest = split(path.read_bytes())
        path.write_bytes(join(outer, header | {"format": version}, rest))
        for _ in range(2):
            with pytest.raises(StoreVersionError, match=f"format {version}"):
                store.get_canonical(CONTEXT, CHUNK)
        assert path.exists() and not list((root / "quarantine").iterdir())


def test_a_sound_file_that_is_moved_back_is_an_object_again(root: Path) -> None:
    with ChunkStore.open(root, memory_limit=0) as store:
        store.put(canonical())
        sound = file_of(root, KEY).read_bytes()
        flip(file_of(root, KEY))
        StoreAdmin(store).verify()
        [copy] = StoreAdmin(store).quarantine.copies()
        held = root / "quarantine" / copy.file
        held.rename(file_of(root, KEY))
        with pytest.raises(CorruptChunk, match="digest"):  # still damaged
            store.get_canonical(CONTEXT, CHUNK)
        file_of(root, KEY).write_bytes(sound)
        assert StoreAdmin(store).verify().ok == 1
        assert store.get_canonical(CONTEXT, CHUNK) is not None


def link_object(root: Path, elsewhere: Path) -> None:
    os.replace(file_of(root, KEY), elsewhere)
    file_of(root, KEY).symlink_to(elsewhere)


def test_a_link_under_an_objects_name_is_quarantined(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    with ChunkStore.open(root, memory_limit=0) as store:
        store.put(canonical())
        link_object(root, elsewhere)
        intact = elsewhere.read_bytes()
        with pytest.raises(CorruptChunk, match=r"link.*quarantine"):
            store.get_canonical(CONTEXT, CHUNK)
        assert store.get_canonical(CONTEXT, CHUNK) is None
        assert [copy.bytes for copy in StoreAdmin(store).quarantine.copies()] == [0]
        store.put(canonical())
        assert not file_of(root, KEY).is_symlink()
        assert StoreAdmin(store).quarantine.drop(KEY) == 1
        assert elsewhere.read_bytes() == intact


@pytest.mark.parametrize("key", ["", "..", "../" + KEY, KEY.upper(), KEY + "/x", "\0" * 64])
def test_no_path_is_made_of_what_is_no_name(root: Path, key: str) -> None:
    with ChunkStore.open(root) as store:
        admin = StoreAdmin(store)
        for use in (admin.objects.load, admin.objects.read, admin.delete, admin.quarantine.drop):
            with pytest.raises(ValueError, match=r"name|key"):
                use(key)
