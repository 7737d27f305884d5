"""The index repeats the files, whatever happens to it, and does not slow down as it grows."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kamera.errors import StoreError
from kamera.store import ChunkStore, Context, ObjectInfo, StoreAdmin
from kamera.store.disk.index import Index
from kamera.store.disk.rows import Stamped
from kamera.store.keys import KINDS
from tests.store.builders import CONTEXT, canonical, patch, rows_of

CHUNK = "c" * 64


def info(number: int, kind: str = "canonical", tenant: str = "", **fields: Any) -> ObjectInfo:
    defaults: dict[str, Any] = {
        "key": f"{number:064x}",
        "kind": kind,
        "chunk_id": f"chunk{number % 50}",
        "context": Context("f" * 64, "a" * 64, tenant),
        "antecedents": ("x", "y"),
        "tokens": 10 + number,
        "rank": None if kind == "canonical" else 4,
        "formed": None if kind == "canonical" else "exact",
        "bytes": 100 + number,
        "created": 1000.0 + number // 3,  # some at the same moment
    }
    return ObjectInfo(**(defaults | fields))


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


class Rows:
    """Files that give just these rows."""

    def __init__(self, rows: list[ObjectInfo], stamp: str = "1-1-1") -> None:
        self.held = {row.key: (row, stamp) for row in rows}
        self.asked = 0

    def names(self) -> list[str]:
        return list(self.held)

    def names_in_traces(self) -> set[str]:
        return set()

    def stamp(self, key: str) -> str | None:
        return self.held[key][1] if key in self.held else None

    def row(self, key: str) -> Stamped | None:
        self.asked += 1
        return self.held.get(key)

    def bring(self, row: ObjectInfo) -> None:
        self.held[row.key] = row, "1-1-1"

    def take(self, key: str) -> None:
        del self.held[key]


def filled(path: Path, rows: list[ObjectInfo], clock: Callable[[], float] = CLOCK) -> Index:
    return Index(path, Rows(rows), clock=clock)


def listed(path: Path, rows: list[ObjectInfo]) -> None:
    """An index of ``rows`` at ``path``, closed."""
    index = filled(path, rows)
    assert len(rows_of(index, tenant="")) == len(rows)
    index.close()


def plan_of(index: Index, sql: str, *values: str) -> str:
    rows = index._db.execute(f"EXPLAIN QUERY PLAN {sql}", values)
    return " / ".join(row[3] for row in rows)


def overwrite(path: Path, start: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(data)


ROWS = [info(i, kind=("canonical", "exact", "orbit")[i % 3]) for i in range(2500)]


def test_rows_come_in_order_and_in_parts_that_make_the_whole(tmp_path: Path) -> None:
    index = filled(tmp_path / "i", ROWS)
    expected = sorted(ROWS, key=lambda row: (row.created, row.key))
    assert rows_of(index, tenant="") == expected
    parts = [rows_of(index, tenant="", limit=700, offset=at) for at in range(0, 3000, 700)]
    assert [row for part in parts for row in part] == expected
    assert [len(part) for part in parts] == [700, 700, 700, 400, 0]
    exact = [row for row in expected if row.kind == "exact"]
    assert rows_of(index, tenant="", kind="exact") == exact
    assert rows_of(index, tenant="", kind="exact", limit=3, offset=5) == exact[5:8]
    assert rows_of(index, tenant="", chunk_id="chunk7") == [r for r in expected if r.chunk_id == "chunk7"]
    assert rows_of(index, tenant="other") == []


def test_a_row_added_during_a_listing_disturbs_no_other(tmp_path: Path) -> None:
    files = Rows(ROWS)
    index = Index(tmp_path / "i", files)
    listed = index.iterate(tenant="")
    first = [next(listed) for _ in range(10)]
    files.bring(info(9999, created=0.0))  # before everything listed so far
    index.put([files.held[info(9999).key]])
    for gone in first[2:8]:
        files.take(gone.key)
    assert len(rows_of(index, tenant="")) == len(ROWS) - 5
    assert first + list(listed) == sorted(ROWS, key=lambda row: (row.created, row.key))


def test_counts_equal_those_of_the_rows(tmp_path: Path) -> None:
    rows = [*ROWS, info(5000, tenant="acme"), info(5001, context=Context("g" * 64, "a" * 64))]
    index = filled(tmp_path / "i", rows)
    mine = [row for row in rows if row.context.tenant == ""]
    for kind in (None, "canonical", "exact", "orbit"):
        shown = [row for row in mine if kind in (None, row.kind)]
        census = index.census("", kind)
        assert census.chunks == len({row.chunk_id for row in shown})
        assert census.contexts == len({row.context for row in shown})
        assert sum(held.objects for held in census.kinds.values()) == len(shown)
        assert sum(held.bytes for held in census.kinds.values()) == sum(row.bytes for row in shown)
        assert set(census.kinds) == ({kind} if kind else set(KINDS))
    assert [held.objects for held in index.kinds("acme").values() if held.objects] == [1]


def test_no_lookup_or_listing_walks_the_table(tmp_path: Path) -> None:
    index = filled(tmp_path / "i", ROWS)
    rows_of(index, tenant="")
    plans = [
        plan_of(index, "SELECT * FROM objects WHERE key = ?", "k"),
        plan_of(
            index,
            "SELECT * FROM objects WHERE tenant = ? AND kind = ? AND chunk_id = ? ORDER BY created, key",
            *("", "canonical", CHUNK),
        ),
        plan_of(index, "SELECT * FROM objects WHERE tenant = ? ORDER BY created, key LIMIT 10", ""),
        plan_of(index, "SELECT kind, COUNT(*), SUM(bytes) FROM objects WHERE tenant = ? GROUP BY kind", ""),
    ]
    wanted = ["PRIMARY KEY", "by_chunk", "by_age", "COVERING INDEX by_kind"]
    for plan, name in zip(plans, wanted, strict=True):
        assert name in plan and "SCAN" not in plan and "TEMP B-TREE" not in plan


@pytest.mark.parametrize("tenant", ["", None])
def test_what_gc_reads_comes_in_pages_that_sort_nothing(
    tmp_path: Path, tenant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = filled(tmp_path / "index.sqlite", [info(number) for number in range(20)])
    rows_of(index, tenant="")
    asked: list[tuple[str, tuple[str, ...]]] = []
    execute = index._db.execute
    monkeypatch.setattr(index._db, "execute", lambda sql, v=(): asked.append((sql, v)) or execute(sql, v))
    assert len(list(index.weigh(tenant))) == 20
    monkeypatch.undo()
    pages = [(sql, values) for sql, values in asked if "LEFT JOIN" in sql]
    assert len(pages) == 2
    for sql, values in pages:
        assert "TEMP B-TREE" not in plan_of(index, sql, *values)


def test_counting_reads_equally_little_of_any_index(tmp_path: Path) -> None:
    read = []
    for count in (20, 2500):
        path = tmp_path / str(count)
        filled(path, ROWS[:count]).kinds("")
        filled(path, ROWS[:count]).close()
        again = filled(path, ROWS[:count])
        again.kinds("nobody")  # which compares the names, once
        before = int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])
        again.kinds("nobody")
        read.append(int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0]) - before)
        assert again._files.asked == 0  # type: ignore[attr-defined]
    assert os.path.getsize(tmp_path / "2500") > 20 * os.path.getsize(tmp_path / "20")
    assert read[1] <= read[0] + 16 * 4096


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["a page", "every page but the first", "half", "all", "a row", "a table"])
def test_damage_met_in_use_is_repaired_from_the_files(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "i"
    listed(path, ROWS)
    size = path.stat().st_size
    if damage == "a page":
        overwrite(path, 10 * 4096, b"\xff" * 4096)
    elif damage == "every page but the first":
        overwrite(path, 4096, b"\xa5" * (size - 4096))
    elif damage == "half":
        os.truncate(path, size // 2)
    elif damage == "all":
        path.write_bytes(b"no database " * 1000)
    elif damage == "a row":
        with sqlite3.connect(path) as db:
            db.execute("UPDATE objects SET base = 'of no object' WHERE key = ?", (ROWS[5].key,))
        db.close()
    else:
        with sqlite3.connect(path) as db:
            db.execute("DROP TABLE objects")
        db.close()
    index = filled(path, ROWS)
    assert rows_of(index, tenant="") == sorted(ROWS, key=lambda row: (row.created, row.key))
    assert sum(held.objects for held in index.kinds("").values()) == len(ROWS)


def test_a_write_that_meets_damage_is_not_lost(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with ChunkStore.open(root) as store:
        for i in range(60):
            store.put(patch(antecedents=(str(i),)))
    path = root / "index.sqlite"
    overwrite(path, 4096, b"\xff" * (path.stat().st_size - 4096))
    with ChunkStore.open(root) as store:
        store.put(canonical())
        assert len(store.ls()) == 61
        assert store.get_canonical(CONTEXT, CHUNK) is not None


def test_a_rebuild_finds_what_reading_has_not_met_yet(tmp_path: Path) -> None:
    path = tmp_path / "i"
    listed(path, ROWS)
    overwrite(path, path.stat().st_size - 4096, b"\xff" * 4096)
    index = filled(path, ROWS)
    assert index.correct_all_rows(afresh=True) == len(ROWS)
    assert index._db.execute("PRAGMA integrity_check(1)") == [("ok",)]
    assert len(rows_of(index, tenant="")) == len(ROWS)


def test_verify_finds_damage_of_the_index_too(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with ChunkStore.open(root) as store:
        for i in range(60):
            store.put(patch(antecedents=(str(i),)))
    path = root / "index.sqlite"
    overwrite(path, path.stat().st_size - 4096, b"\xff" * 4096)
    with ChunkStore.open(root) as store:
        StoreAdmin(store).verify()
        database = store._disk.index._db  # type: ignore[union-attr]
        assert database.execute("PRAGMA integrity_check(1)") == [("ok",)]
        assert len(store.ls()) == 60


def test_a_process_that_holds_the_file_that_was_replaced_follows(tmp_path: Path) -> None:
    files = Rows(ROWS[:5])
    mine, other = Index(tmp_path / "i", files), Index(tmp_path / "i", files)
    assert len(rows_of(mine, tenant="")) == len(rows_of(other, tenant="")) == 5
    other._db._remove(sqlite3.DatabaseError("said so"))
    files.bring(ROWS[5])
    mine.put([(ROWS[5], "1-1-1")])
    assert len(rows_of(other, tenant="")) == len(rows_of(mine, tenant="")) == 6
    mine.close()
    files.bring(ROWS[6])
    other.put([(ROWS[6], "1-1-1")])
    assert len(rows_of(other, tenant="")) == 7
    other.close()


def test_a_file_replaced_before_it_is_asked_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, other = filled(tmp_path / "i", ROWS[:7]), filled(tmp_path / "i", ROWS[:7])
    assert len(rows_of(index, tenant="")) == len(rows_of(other, tenant="")) == 7
    agree, left = index._agree, [2, 1]

    def replaced(db: Any) -> Any:
        agreed = agree(db)
        if left and left.pop():
            other._db._remove(sqlite3.DatabaseError("said so"))
        return agreed

    monkeypatch.setattr(index, "_agree", replaced)
    assert len(rows_of(index, tenant="")) == 7 and not left


def test_an_index_deleted_under_a_living_process_is_filled_again(tmp_path: Path) -> None:
    index = filled(tmp_path / "i", ROWS[:7])
    for path in tmp_path.glob("i*"):
        path.unlink()
    assert len(rows_of(index, tenant="")) == 7


def test_a_repair_that_was_interrupted_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = filled(tmp_path / "i", ROWS[:2])
    assert len(rows_of(index, tenant="")) == 2

    def fails(key: str) -> Stamped | None:
        raise OSError("the disk is away")

    index._db._remove(sqlite3.DatabaseError("said so"))
    monkeypatch.setattr(index._files, "row", fails)
    for _ in range(2):
        with pytest.raises(StoreError, match="the disk is away"):  # and never an empty list
            rows_of(index, tenant="")
    monkeypatch.undo()
    assert len(rows_of(index, tenant="")) == 2


def test_an_index_of_the_schema_before_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with ChunkStore.open(root) as store:
        store.put(canonical())
        before = store.ls()
    with sqlite3.connect(root / "index.sqlite") as db:
        db.executescript("DROP TABLE uses; DROP INDEX by_age; PRAGMA user_version = 2")
    db.close()
    with ChunkStore.open(root) as store:
        assert store.ls() == before


def replace_often(path: Path, ready: Any) -> None:
    index = filled(path, ROWS[:200])
    ready.wait()
    for _ in range(10):
        index._db._remove(sqlite3.DatabaseError("said so"))
    index.close()


def test_processes_that_replace_one_index_always_see_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "i"
    listed(path, ROWS[:200])
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(3)
    others = [fork.Process(target=replace_often, args=(path, ready)) for _ in range(2)]
    for other in others:
        other.start()
    index = filled(path, ROWS[:200])
    ready.wait()
    while any(other.is_alive() for other in others):
        assert len(rows_of(index, tenant="")) == 200
    assert [other.exitcode for other in others] == [0, 0]
