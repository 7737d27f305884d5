"""A disk that is full, or that cannot be written to: look-ups go on, and the way out works."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import StoreError, StoreReadOnly
from kamera.store import ChunkStore, StoreAdmin
from kamera.store import index as index_module
from kamera.store.remote import ObjectBlobs
from tests.store.builders import CHUNK, CONTEXT, canonical, drop_index, patch, snapshot


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(where)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system needs the right to mount one")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def fill(where: Path) -> None:
    """Leave not a byte."""
    with open(where / "ballast", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


def stored(root: Path, count: int = 20) -> list[str]:
    with ChunkStore.open(root) as store:
        return [store.put(canonical(f"{number:064x}")) for number in range(count)]


def test_a_disk_that_fills_while_a_store_is_open_loses_no_row(small: Path) -> None:
    root = small / "store"
    with ChunkStore.open(root, memory_limit=0) as store:
        for number in range(5):
            store.put(canonical(f"{number:064x}"))
        assert len(store.ls()) == 5
        fill(small)
        with open(small / "ballast", "r+b") as file:  # room for an object, and none for its row
            file.truncate(file.seek(0, os.SEEK_END) - 8192)
        put = 0
        for number in range(5, 20):
            try:
                store.put(canonical(f"{number:064x}"))
                put += 1
            except StoreError:
                pass
        assert len(store.ls()) == 5 + put
        gone = StoreAdmin(store).gc(0)
        assert len(gone.removed) == 5 + put and store.ls() == []
    (small / "ballast").unlink()
    with ChunkStore.open(root) as store:
        assert store.ls() == []


def test_a_read_only_file_system_is_read(small: Path) -> None:
    root = small / "store"
    stored(root, 5)
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
    before = snapshot(root)
    with ChunkStore.open(root, memory_limit=0) as store:
        assert len(store.ls()) == 5 and StoreAdmin(store).stats().canonicals == 5
        assert store.get_canonical(CONTEXT, f"{3:064x}") is not None
        for refused in (lambda: store.put(canonical()), lambda: StoreAdmin(store).gc(0)):
            with pytest.raises(StoreReadOnly, match="read only"):
                refused()
        assert StoreAdmin(store).verify().ok == 5
    assert snapshot(root) == before


@pytest.mark.parametrize("kind", ["listed", "without an index", "with a damaged one"])
def test_read_only_serves_and_lists_and_changes_nothing(tmp_path: Path, kind: str) -> None:
    root = tmp_path / "store"
    keys = stored(root, 5)
    if kind != "listed":
        drop_index(root)
    if kind == "with a damaged one":
        (root / "index.sqlite").write_bytes(b"no database " * 1000)
    (root / "quarantine" / f"{keys[0]}.17.safetensors").write_bytes(b"damaged")
    before = snapshot(root)
    with ChunkStore.open(root, read_only=True, memory_limit=0) as store:
        assert {info.key for info in store.ls()} == set(keys)
        assert store.get_canonical(CONTEXT, f"{3:064x}") is not None
        for refused in (
            lambda: store.put(canonical()),
            lambda: store.put(patch()),
            lambda: StoreAdmin(store).delete(keys[0]),
            lambda: StoreAdmin(store).gc(0),
            lambda: StoreAdmin(store).drop_quarantined(keys[0]),
        ):
            with pytest.raises(StoreReadOnly, match="read_only="):
                refused()
    assert snapshot(root) == before


class Refusing:
    """A SQLite connection to a disk without room: what writes fails, what reads does not."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def execute(self, sql: str, values: Any = ()) -> Any:
        if sql.split(None, 1)[0].upper() in ("INSERT", "DELETE", "UPDATE"):
            raise sqlite3.OperationalError("database or disk is full")
        return self._real.execute(sql, values)

    def executemany(self, sql: str, values: Any) -> Any:
        raise sqlite3.OperationalError("database or disk is full")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_an_index_without_room_keeps_nobody_from_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk, on any machine: every statement that writes to a file is refused."""
    root = tmp_path / "store"
    keys = stored(root, 5)
    real = index_module.sqlite3.connect

    def connect(path: Any, **named: Any) -> Any:
        db = real(path, **named)
        return db if path == ":memory:" or named.get("uri") else Refusing(db)

    monkeypatch.setattr(index_module.sqlite3, "connect", connect)
    with ChunkStore.open(root, memory_limit=0) as store:
        new = store.put(canonical())
        assert store.get_canonical(CONTEXT, CHUNK) is not None
        assert {info.key for info in store.ls()} == {*keys, new}
        assert StoreAdmin(store).delete(keys[0]) and len(store.ls()) == 5
        report = StoreAdmin(store).gc(StoreAdmin(store).stats().bytes // 2)
        assert report.objects_after == len(store.ls()) < 5
    monkeypatch.undo()
    with ChunkStore.open(root) as store:
        assert len(store.ls()) == report.objects_after


def test_what_a_full_cache_takes_none_of_is_read_ahead_once(small: Path, tmp_path: Path, monkeypatch) -> None:
    url, ids = f"obstore+file://{tmp_path}/remote", [f"{number:064x}" for number in range(4)]
    with ChunkStore.open(url) as store:
        for chunk in ids:
            store.put(canonical(chunk))
        store.flush()
    get, asked = ObjectBlobs.get, list[str]()

    def counted(blobs: ObjectBlobs, name: str) -> bytes | None:
        asked.append(name)
        return get(blobs, name)

    monkeypatch.setattr(ObjectBlobs, "get", counted)
    with ChunkStore.open(url, cache=small / "cache") as store:
        fill(small)
        infos = [info for chunk in ids if (info := store.info(CONTEXT, chunk)) is not None]
        with store.read_ahead(infos):
            found = [store.get_canonical(CONTEXT, chunk) for chunk in ids]
        assert [record and record.chunk_id for record in found] == ids
        assert len(asked) == len(set(asked)) == len(ids)
        (small / "ballast").unlink()  # nothing of what was read ahead stays behind
        with ChunkStore.open(url) as other:
            assert StoreAdmin(other).delete(infos[0].key)
        assert store.get_canonical(CONTEXT, ids[0]) is None
