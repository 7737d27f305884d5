"""Rows follow the files: lost, wrong or interrupted, they are made right again."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from kamera.store import ChunkStore
from kamera.store.codec import Codec
from kamera.store.disk.files import ObjectFiles
from tests.store.builders import CHUNK, CONTEXT, canonical, drop_index, encode, file_of, patch


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
        (row,) = db.execute("SELECT * FROM objects").fetchall()
        names = [told[1] for told in db.execute("PRAGMA table_info(objects)")]
        said = json.loads(row[-2])
        document = json.dumps(said | {"tokens": "HERE"}).replace('"HERE"', value)
        forged = (*row[:-2], document)
        signature = Codec().sign(json.dumps(forged))
        db.execute(f"UPDATE objects SET {names[-2]} = ?, {names[-1]} = ?", (document, signature))
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
    peek = ObjectFiles.peek
    calls: list[str] = []

    def dies(self: Any, key: str) -> Any:
        calls.append(key)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return peek(self, key)

    monkeypatch.setattr(ObjectFiles, "peek", dies)
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
