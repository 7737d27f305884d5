"""Rows follow the files: lost, wrong or interrupted, they are made right again."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kamera.store import ChunkStore, Context, StoreAdmin
from kamera.store.directory import Directory
from tests.store.builders import CHUNK, CONTEXT, canonical, drop_index, encode, file_of, patch

SECRET = b"s" * 32
ACME = Context(CONTEXT.fingerprint, CONTEXT.anchor, "acme")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_a_lost_index_is_rebuilt_from_the_files(root: Path) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical())
        store.put(patch(formed="survivor"))
        before = store.ls()
    drop_index(root)
    with ChunkStore.open(root) as store:
        assert store.ls() == before
        assert store.contexts_of(CHUNK) == [CONTEXT]


@pytest.mark.few(1)
@pytest.mark.parametrize("damage", ["garbage", "truncated", "half a page", "another schema"])
def test_an_unreadable_index_is_rebuilt_from_the_files(root: Path, damage: str) -> None:
    with ChunkStore.open(root) as store:
        for i in range(60):
            store.put(patch(antecedents=(str(i),)))
        before = store.ls()
    path = root / "index.sqlite"
    data = path.read_bytes()
    if damage == "garbage":
        path.write_bytes(b"no database " * 1000)
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "half a page":
        path.write_bytes(data[:6000] + b"\xff" * 6000 + data[12000:])
    else:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    with ChunkStore.open(root) as store:
        assert store.ls() == before


@pytest.mark.parametrize("value", ["1e999", "[" * 100_000, '"ten"'], ids=["infinite", "deep", "text"])
def test_a_row_that_says_what_no_object_does_is_made_anew(root: Path, value: str) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical())
        before = store.ls()
    with sqlite3.connect(root / "index.sqlite") as db:
        [(said,)] = db.execute("SELECT said FROM objects").fetchall()
        forged = json.dumps(json.loads(said) | {"tokens": "HERE"}).replace('"HERE"', value)
        db.execute("UPDATE objects SET said = ?", (forged,))
    db.close()
    with ChunkStore.open(root) as store:
        assert store.ls() == before


def test_a_listing_that_was_interrupted_is_whole_the_next_time(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ChunkStore.open(root) as store:
        store.put(canonical())
        store.put(patch())
    drop_index(root)
    peek = Directory.peek
    calls: list[str] = []

    def dies(self: Any, key: str) -> Any:
        calls.append(key)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return peek(self, key)

    monkeypatch.setattr(Directory, "peek", dies)
    with ChunkStore.open(root) as store:
        with pytest.raises(KeyboardInterrupt):
            store.ls()
        monkeypatch.undo()
        assert len(store.ls()) == 2
    with ChunkStore.open(root) as store:
        assert len(store.ls()) == 2


def test_a_file_without_a_row_is_found_and_its_row_repaired(root: Path) -> None:
    for record in (canonical(), patch()):
        with ChunkStore.open(root) as store:
            path = file_of(root, record.key)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(encode(record, 7.0))
            assert record.key in [i.key for i in store.ls()]  # the first listing looks at all names
            assert next(i for i in store.ls() if i.key == record.key).bytes == path.stat().st_size
            assert (store.get_canonical if record.kind == "canonical" else store.info)(CONTEXT, CHUNK)


# -- locks of a live database are nobody's to drop ---------------------------------------------------


def test_a_second_tenant_that_closes_takes_no_locks_away(root: Path) -> None:
    """Two connections of one process share their locks: closing any descriptor of the file drops them."""
    with ChunkStore.open(root) as mine:
        mine.put(canonical())
        database: Any = mine._disk.index._db  # type: ignore[union-attr]
        database.execute("BEGIN IMMEDIATE")
        try:
            with ChunkStore.open(root, tenant="acme") as other:
                assert other.ls() == []
            rival = sqlite3.connect(root / "index.sqlite", timeout=0, isolation_level=None)
            elsewhere = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)"
                    ".execute('BEGIN IMMEDIATE')",
                    str(root / "index.sqlite"),
                ],
                capture_output=True,
                text=True,
            )
            rival.close()
        finally:
            database.execute("ROLLBACK")
        assert "locked" in elsewhere.stderr


# -- what the index has lost -------------------------------------------------------------------------


def copied(root: Path, target: Path) -> None:
    target.mkdir()
    for path in root.glob("index.sqlite*"):
        shutil.copy(path, target)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["plain", "sealed"])
def test_a_lost_tail_of_the_log_is_noticed(root: Path, kind: str) -> None:
    options: dict[str, Any] = {} if kind == "plain" else {"tenant": "acme", "secret": SECRET}
    context = CONTEXT if kind == "plain" else ACME
    with ChunkStore.open(root, **options) as store:
        folder = store._disk.root  # type: ignore[union-attr]
        for number in range(10):
            store.put(canonical(f"{number:064x}", context))
        copied(folder, root.parent / "before")
        for number in range(10, 40):
            store.put(canonical(f"{number:064x}", context))
        copied(folder, root.parent / "after")
    drop_index(folder)
    for path in (root.parent / "before").iterdir():
        shutil.copy(path, folder)
    with ChunkStore.open(root, **options) as store:
        assert len(store.ls()) == 40 and StoreAdmin(store).stats().canonicals == 40
        assert store.contexts_of(f"{39:064x}") == [context]
        assert StoreAdmin(store).copy(root.parent / "copy").canonicals == 40
        assert StoreAdmin(store).gc(0, dry_run=True).objects_before == 40


# -- rows that lie ------------------------------------------------------------------------------------

LIES = {
    "kind": "orbit",
    "chunk_id": "e" * 64,
    "fingerprint": "e" * 64,
    "anchor": "e" * 64,
    "used": 77.0,
    "home": "z",
    "said": "{}",
    "bytes": 77,
    "created": 7.0,
    "kv": "int8",
}


@pytest.mark.few(6)
@pytest.mark.parametrize("column", LIES)
@pytest.mark.parametrize("kind", ["plain", "sealed"])
def test_verify_mends_whatever_a_row_says_wrongly(root: Path, kind: str, column: str) -> None:
    options: dict[str, Any] = {} if kind == "plain" else {"tenant": "acme", "secret": SECRET}
    context = CONTEXT if kind == "plain" else ACME
    with ChunkStore.open(root, **options) as store:
        key = store.put(patch(context=context))
        store.put(canonical(context=context))
        right = store.ls()
        path = store._disk.root / "index.sqlite"  # type: ignore[union-attr]
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE objects SET {column} = ? WHERE key = ?", (LIES[column], key))
    db.close()
    with ChunkStore.open(root, **options) as store:
        info = store.info(context, CHUNK, ("x", "y"))
        assert info is not None and (info.formed, info.rank) == ("exact", 2)
        StoreAdmin(store).verify()
        assert store.ls() == right
        assert StoreAdmin(store).stats().patches == 1 and StoreAdmin(store).census().chunks == 1


# -- rows that come late ------------------------------------------------------------------------------


def test_rows_that_could_not_be_written_follow_when_the_writer_closes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kamera.store.index.PATIENCE", 0.01)
    with ChunkStore.open(root) as reader:
        assert reader.ls() == []
        rival = sqlite3.connect(root / "index.sqlite", isolation_level=None)
        rival.execute("BEGIN IMMEDIATE")
        with ChunkStore.open(root) as writer:
            key = writer.put(canonical())
            assert [info.key for info in writer.ls()] == [key]
            rival.execute("ROLLBACK")
        rival.close()
        assert [info.key for info in reader.ls()] == [key]


def test_a_canonical_whose_writer_died_before_its_row_has_one_once_it_is_acknowledged(root: Path) -> None:
    with ChunkStore.open(root) as reader, ChunkStore.open(root) as writer:
        assert reader.ls() == writer.ls() == []
        file_of(root, canonical().key).write_bytes(encode(canonical(), 7.0))
        key = writer.put(canonical())
        assert [info.key for info in reader.ls()] == [key]
        assert StoreAdmin(reader).stats().canonicals == 1
