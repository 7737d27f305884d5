"""Storage of embeddings: a small row beside each canonical, so that no search reads the objects.

Rows are derived from the objects, and lost ones are computed again from them.
"""

from __future__ import annotations

import base64
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from kamera.errors import KameraError, StoreError
from kamera.store.codec import Codec
from kamera.store.disk.database import Database
from kamera.store.disk.folder import Folder, NotAFile
from kamera.store.search.embedding import pack, unpack

logger = logging.getLogger(__name__)

_SCHEMA = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS vectors (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE, space TEXT NOT NULL,
    row TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_space ON vectors (space, seq);
CREATE TABLE IF NOT EXISTS epoch (id TEXT NOT NULL);
INSERT INTO epoch VALUES (lower(hex(randomblob(8))));
"""
# as bytes: a damaged row that is not valid text must not stop the reading of the others
_COLUMNS = "seq, CAST(name AS BLOB), CAST(row AS BLOB)"
_PAGE = 500


class Row(NamedTuple):
    """One embedding: ``seq`` grows with every row written; ``vector`` is None without pictures."""

    seq: int
    name: str
    chunk_id: str
    vector: np.ndarray | None


class Fresh(NamedTuple):
    """A row to be written."""

    space: str
    name: str
    chunk_id: str
    vector: np.ndarray | None


class State(NamedTuple):
    """The progress of a space. ``epoch`` changes when the file is rebuilt and its numbers restart at 1."""

    epoch: str
    rows: int
    last: int


class Vectors(Protocol):
    """Embeddings by object name, in spaces of comparable vectors."""

    def put(self, rows: Sequence[Fresh]) -> None:
        """Write rows, each in place of any present one of its name."""

    def drop(self, names: Iterable[str]) -> None:
        """Delete rows, their bytes included."""

    def discard(self, seqs: Iterable[int]) -> None:
        """Delete rows by number."""

    def get(self, name: str) -> Row | None:
        """The row of ``name``; None if absent or damaged."""

    def has(self, name: str) -> bool:
        """True if there is a row of ``name``, damaged or not."""

    def names(self, space: str) -> dict[str, int]:
        """Name and ``seq`` of every row of a space, damaged ones included."""

    def state(self, space: str) -> State:
        """The present state, from which changes can be detected."""

    def after(self, space: str, seq: int) -> Iterator[Row | int]:
        """Rows written after ``seq``, in order; only the number of a damaged one."""

    def damaged(self, why: str) -> None:
        """Report that the rows contradict each other: all are deleted."""


class MemoryVectors:
    """Embeddings of a store that evicts objects without notice: ``present`` returns the stored ones."""

    def __init__(self, present: Callable[[Sequence[str]], Collection[str]]) -> None:
        self._present = present
        self._rows: dict[str, tuple[str, Row]] = {}
        self._seq = itertools.count(1)
        self._full = _PAGE
        self._lock = threading.Lock()

    def put(self, rows: Sequence[Fresh]) -> None:
        with self._lock:
            for space, name, chunk_id, vector in rows:
                self._rows.pop(name, None)  # rows stay in the order of their numbers
                self._rows[name] = space, Row(next(self._seq), name, chunk_id, vector)
            if len(self._rows) > self._full:
                there = self._present(list(self._rows))
                self._rows = {name: held for name, held in self._rows.items() if name in there}
                self._full = max(_PAGE, 2 * len(self._rows))

    def drop(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._rows.pop(name, None)

    def discard(self, seqs: Iterable[int]) -> None:
        gone = set(seqs)
        with self._lock:
            self._rows = {name: held for name, held in self._rows.items() if held[1].seq not in gone}

    def get(self, name: str) -> Row | None:
        return self._rows.get(name, ("", None))[1]

    def has(self, name: str) -> bool:
        return name in self._rows

    def names(self, space: str) -> dict[str, int]:
        return {row.name: row.seq for row in self._of(space)}

    def state(self, space: str) -> State:
        rows = self._of(space)
        return State("", len(rows), rows[-1].seq if rows else 0)

    def after(self, space: str, seq: int) -> Iterator[Row | int]:
        yield from (row for row in self._of(space) if row.seq > seq)

    def damaged(self, why: str) -> None:
        raise AssertionError(why)

    def _of(self, space: str) -> list[Row]:
        with self._lock:
            return [row for where, row in self._rows.values() if where == space]


class DiskVectors:
    """Embeddings in one SQLite file. Safe to use from several threads and processes.

    In a sealed store (`codec`) rows are veiled like the ids of its index. Raises `Unusable` when SQLite
    fails; a damaged file is replaced by an empty one, of another epoch.
    """

    def __init__(self, path: Path, codec: Codec) -> None:
        self._codec = codec
        try:
            with Folder.at(path.parent.parent) as store, store.sub(path.parent.name, make=True) as folder:
                folder.refuse_links()  # SQLite would follow one
        except (NotAFile, NotADirectoryError) as error:
            raise StoreError(f"{path} cannot be reached: {error}") from error
        except OSError as error:
            logger.debug("%s: %s", path, error)  # raised when it is used
        self._db = Database(path, _SCHEMA, _TABLES)

    def put(self, rows: Sequence[Fresh]) -> None:
        sql = "INSERT OR REPLACE INTO vectors (name, space, row) VALUES (?, ?, ?)"
        with self._db.writing():
            self._db.execute_many(sql, [(row.name, row.space, self._text(row)) for row in rows])

    def drop(self, names: Iterable[str]) -> None:
        self._delete("name", names)

    def discard(self, seqs: Iterable[int]) -> None:
        self._delete("seq", seqs)

    def get(self, name: str) -> Row | None:
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM vectors WHERE name = ?", (name,))
        found = self._read(*rows[0]) if rows else None
        return found if isinstance(found, Row) else None

    def has(self, name: str) -> bool:
        return bool(self._db.execute("SELECT 1 FROM vectors WHERE name = ?", (name,)))

    def names(self, space: str) -> dict[str, int]:
        rows = self._db.execute("SELECT CAST(name AS BLOB), seq FROM vectors WHERE space = ?", (space,))
        return {name.decode(errors="replace"): seq for name, seq in rows}

    def state(self, space: str) -> State:
        sql = "SELECT (SELECT id FROM epoch), COUNT(*), COALESCE(MAX(seq), 0) FROM vectors WHERE space = ?"
        [[epoch, rows, last]] = self._db.execute(sql, (space,))
        return State(str(epoch), int(rows), int(last))

    def after(self, space: str, seq: int) -> Iterator[Row | int]:
        sql = f"SELECT {_COLUMNS} FROM vectors WHERE space = ? AND seq > ? ORDER BY seq LIMIT {_PAGE}"
        while page := self._db.execute(sql, (space, seq)):
            yield from (self._read(*columns) for columns in page)
            seq = page[-1][0]

    def damaged(self, why: str) -> None:
        self._db.damaged(why)

    def check(self) -> str | None:
        """Read the whole file; return the fault, if any, after which the file is empty."""
        return self._db.problem()

    def scrub(self) -> str | None:
        """Erase all traces of deleted rows; None, or the possible remains and the reason."""
        return self._db.scrub()

    def close(self) -> None:
        """Close the file; nothing works afterwards."""
        self._db.close()

    def _delete(self, column: str, values: Iterable[object]) -> None:
        gone = list(values)
        if not gone:
            return
        with self._db.writing():
            self._db.execute_many(f"DELETE FROM vectors WHERE {column} = ?", [(v,) for v in gone])
        # the log would keep the deleted bytes until it is written over
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _text(self, row: Fresh) -> str:
        packed = pack(row.name, row.chunk_id, row.vector)
        return self._codec.veil(base64.b64encode(packed).decode())

    def _read(self, seq: int, raw: bytes, text: bytes) -> Row | int:
        try:
            name = raw.decode()
            data = base64.b64decode(self._codec.unveil(text.decode()), validate=True)
            return Row(seq, name, *unpack(name, data))
        except (KameraError, AttributeError, TypeError, ValueError):
            return seq
