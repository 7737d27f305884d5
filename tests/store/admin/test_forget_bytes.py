"""After `forget` no byte of the id is below the store's folder, and only what was named is forgotten."""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kamera.cli.app import main
from kamera.errors import AmbiguousId, UnknownChunk
from kamera.store import ChunkStore, StoreAdmin
from kamera.store.codec import Codec
from kamera.store.disk import database as database_module
from kamera.store.disk.database import Database
from kamera.store.disk.rows import INSERT
from tests.store.builders import CONTEXT, canonical, patch, snapshot

SECRET, KEY = b"a secret of acme, 32 bytes long!", b"k" * 32
STORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sealed": {"secret": SECRET},
    "encrypted": {"secret": SECRET, "keys": [KEY]},
}


def chunk(n: int) -> str:
    return hashlib.sha256(str(n).encode()).hexdigest()


def fill(store: ChunkStore, count: int) -> None:
    """So many chunks with one patch each behind others, in an order that makes SQLite move rows about."""
    order = list(range(count))
    random.Random(5).shuffle(order)
    for n in order:
        store.put(canonical(chunk(n)))
        behind = tuple(chunk((n * 7 + k) % count) for k in range(1, 1 + n % 4))
        store.put(patch(chunk(n), antecedents=behind))


def holding(root: Path, needles: dict[str, bytes]) -> list[tuple[str, str]]:
    return [(f, what) for f, data in snapshot(root).items() for what, n in needles.items() if n in data]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.mark.parametrize("options", STORES.values(), ids=STORES)
def test_no_byte_of_a_forgotten_id_is_left_in_any_file(root: Path, options: dict[str, Any]) -> None:
    count, gone = 60, [chunk(n) for n in (3, 17, 41, 44, 59)]
    with ChunkStore.open(root, **options) as store:
        fill(store, count)
        codec: Codec = StoreAdmin(store).objects.codec
        for one in gone:
            done = StoreAdmin(store).forget(one)
            assert done.removed and done.left == ()
        needles = {
            f"{one[:6]} {form}": data
            for one in gone
            for form, data in {
                "hex": one.encode(),
                "raw": bytes.fromhex(one),
                "veiled": codec.seal_id(one).encode(),
            }.items()
        }
        assert holding(root, needles) == []
        assert {i.chunk_id for i in store.ls()} == {chunk(n) for n in range(count)} - set(gone)
    assert holding(root, needles) == []


def test_rows_that_sqlite_moved_leave_no_copy_behind(tmp_path: Path) -> None:
    """Where SQLite moves rows between pages copies stay, `secure_delete` or not; a scrub leaves none."""
    database = Database(tmp_path / "x.sqlite")
    ids, count = [chunk(n) for n in range(3000)], 0
    with database.writing() as db:
        for n, one in enumerate(ids):
            row = (one, "", chunk(-n), *[""] * 7, n, "", "m" * (n * 37 % 601), "")
            db.execute(INSERT, row)
        for n in range(0, len(ids), 3):
            count += db.execute("DELETE FROM objects WHERE key = ?", (ids[n],)).rowcount
    assert database.erase_deleted() is None
    data = b"".join(snapshot(tmp_path).values())
    gone = range(0, len(ids), 3)
    assert [n for n in gone if ids[n].encode() in data or (n and chunk(-n).encode() in data)] == []
    assert database.execute("SELECT COUNT(*) FROM objects") == [(len(ids) - count,)]
    database.close()


def test_a_log_that_a_reader_keeps_is_told_of_and_emptied_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "PATIENCE", 0.05)
    with ChunkStore.open(root) as store:
        fill(store, 3)
        reader = sqlite3.connect(root / "index.sqlite", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT COUNT(*) FROM objects").fetchall()
        done = StoreAdmin(store).forget(chunk(1))
        assert done.removed and len(done.left) == 1 and "index.sqlite-wal" in done.left[0]
        reader.close()
        assert StoreAdmin(store).forget(chunk(1)).left == ()
        assert holding(root, {"hex": chunk(1).encode()}) == []


def test_a_start_of_one_chunk_is_forgotten_as_that_chunk(root: Path) -> None:
    with ChunkStore.open(root) as store:
        fill(store, 4)
        done = StoreAdmin(store).forget(chunk(2)[:12])
        assert done.chunk_id == chunk(2) and done.removed and done.left == ()
        assert store.contexts_of(chunk(2)) == [] and store.contexts_of(chunk(3)) == [CONTEXT]


def test_a_start_of_none_or_of_several_forgets_nothing(root: Path) -> None:
    with ChunkStore.open(root) as store:
        for one in ("ab" + "0" * 62, "ab" + "1" * 62):
            store.put(canonical(one))
        with pytest.raises(AmbiguousId, match="'ab' names no one chunk: 2 begin so"):
            StoreAdmin(store).forget("ab")
        for start in ("abc", "", "ab" * 33):
            with pytest.raises(UnknownChunk, match="begins with"):
                StoreAdmin(store).forget(start)
        assert len(store.ls()) == 2
        assert StoreAdmin(store).forget("f" * 64).removed == ()


def test_a_start_of_anothers_chunk_names_nothing(root: Path) -> None:
    with ChunkStore.open(root) as store, ChunkStore.open(root, tenant="acme") as other:
        store.put(canonical(chunk(1)))
        with pytest.raises(UnknownChunk):
            StoreAdmin(other).forget(chunk(1)[:12])
        other.put(canonical(chunk(2), replace(CONTEXT, tenant="acme")))
        assert StoreAdmin(other).forget(chunk(2)[:12]).removed
        assert store.contexts_of(chunk(1)) == [CONTEXT]


def test_a_chunk_known_only_as_antecedent_is_found_by_prefix(root: Path) -> None:
    with ChunkStore.open(root) as store:
        key = store.put(patch(chunk(1), antecedents=(chunk(2),)))
        assert StoreAdmin(store).forget(chunk(2)[:12]).removed == (key,)


def test_the_command_forgets_by_the_id_that_ls_prints(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ChunkStore.open(root) as store:
        fill(store, 3)
    assert main(["store", "forget", str(root), chunk(1)[:12], "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chunk_id"] == chunk(1) and told["removed"] and not told["left"]
    for argument in (chunk(1)[:12], chunk(1), "not an id"):
        assert main(["store", "forget", str(root), argument]) == 1
        assert argument in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["store", "pin"], ["store", "unpin"], ["store", "forget"], ["inspect"]])
def test_a_start_of_none_or_of_several_is_exit_code_1(
    root: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with ChunkStore.open(root) as store:
        for one in ("ab" + "0" * 62, "ab" + "1" * 62):
            store.put(canonical(one))
    for start, says in (("ab", "give more of it"), ("abc", "begins with")):
        assert main([*verb, str(root), start]) == 1
        assert says in capsys.readouterr().err
    with ChunkStore.open(root) as store:
        assert len(store.ls()) == 2 and StoreAdmin(store).pins.list() == []


def test_inspect_shows_the_objects_of_one_chunk(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ChunkStore.open(root) as store:
        fill(store, 3)
    assert main(["inspect", str(root), chunk(1)[:12], "--format", "json"]) == 0
    assert {o["chunk_id"] for o in json.loads(capsys.readouterr().out)["contents"]} == {chunk(1)}
