"""Damaged, foreign and newer files of a directory: refused, set aside or left, never served."""

from __future__ import annotations

from pathlib import Path

import pytest

from kamera.errors import CorruptChunk, StoreVersionError
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.head import FORMAT_VERSION
from tests.store.builders import (
    CHUNK,
    CONTEXT,
    assert_same,
    canonical,
    encode,
    file_of,
    flip,
    join,
    patch,
    split,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


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
