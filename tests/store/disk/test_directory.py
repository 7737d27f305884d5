"""A directory that several processes use: files are the truth, whatever becomes of the index."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kamera.store import ChunkStore, Context, StoreAdmin
from tests.store.builders import CHUNK, CONTEXT, canonical, drop_index, patch

SECRET = b"s" * 32
ACME = Context(CONTEXT.fingerprint, CONTEXT.anchor, "acme")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


# -- locks of a live database are nobody's to drop ---------------------------------------------------


def test_a_second_tenant_that_closes_takes_no_locks_away(root: Path) -> None:
    """Two connections of one process share their locks: closing any descriptor of the file drops them."""
    with ChunkStore.open(root) as mine:
        mine.put(canonical())
        database: Any = mine._disk.index._db  # type: ignore[union-attr]
        with database.writing():
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
        assert "locked" in elsewhere.stderr


# -- what the index has lost -------------------------------------------------------------------------


def copied(root: Path, target: Path) -> None:
    target.mkdir()
    for path in root.glob("index.sqlite*"):
        shutil.copy(path, target)


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
    "tokens": 77,
    "base": "z",
    "said": "{}",
    "bytes": 77,
    "created": 7.0,
    "kv": "int8",
}


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


# -- nobody waits ------------------------------------------------------------------------------------
