"""The index repeats the files, whatever happens to it, and does not slow down as it grows."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kamera.store import Context, ObjectInfo
from kamera.store.disk.index import Index
from kamera.store.disk.rows import Stamped
from tests.store.builders import rows_of


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


def overwrite(path: Path, start: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(data)


ROWS = [info(i, kind=("canonical", "exact", "orbit")[i % 3]) for i in range(2500)]


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
