from __future__ import annotations

import os
from pathlib import Path

import pytest

from kamera.errors import CorruptChunk
from kamera.store import ChunkStore, StoreAdmin
from tests.store.builders import CHUNK, CONTEXT, canonical, file_of, flip

KEY = canonical().key


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


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
        disk = store._disk
        assert disk is not None
        for use in (disk.read, disk.stamp, disk.info, disk.delete, disk.load):
            with pytest.raises(ValueError, match="name"):
                use(key)
        assert not disk.is_stored_intact(key)
