"""The index: one row per object, so that listing never opens the objects.

It only repeats what the files say. Whoever loses it rebuilds it; where it disagrees with the files,
the files are right.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kamera.errors import StoreError
from kamera.store.info import ObjectInfo
from kamera.store.keys import Context

logger = logging.getLogger(__name__)

_SCHEMA = 1
_TABLE = """
CREATE TABLE IF NOT EXISTS objects (
    key TEXT PRIMARY KEY, kind TEXT NOT NULL, chunk_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL, anchor TEXT NOT NULL, tenant TEXT NOT NULL,
    antecedents TEXT NOT NULL, tokens INTEGER NOT NULL, rank INTEGER, formed TEXT,
    bytes INTEGER NOT NULL, created REAL NOT NULL, stamp TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_chunk ON objects (chunk_id);
"""
_BUSY_SECONDS = 60.0  # another process may be rebuilding

Stamped = tuple[ObjectInfo, str]
"""A row: the object, and the stamp of the file it was read from."""


class Index:
    """Rows of objects in SQLite (WAL). Safe to use from several threads and processes.

    Raises `StoreError` when SQLite fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        with self._translated():
            try:
                self._db = self._connect()
            except sqlite3.DatabaseError as error:
                if _is_busy(error):
                    raise
                logger.warning("index %s is unreadable (%s): starting over", path, error)
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
                self._db = self._connect()

    @property
    def complete(self) -> bool:
        """Whether it was ever filled from the files; if not, `rebuild` is due."""
        return bool(self._execute("PRAGMA user_version")[0][0] == _SCHEMA)

    def put(self, info: ObjectInfo, stamp: str) -> None:
        """Write the row of an object whose file is in place."""
        self._execute(_INSERT, _row(info, stamp))

    def get(self, key: str) -> Stamped | None:
        """The row of ``key``."""
        rows = self._select("key = ?", (key,))
        return rows[0] if rows else None

    def drop(self, key: str) -> None:
        """Delete the row of ``key``, if there is one."""
        self._execute("DELETE FROM objects WHERE key = ?", (key,))

    def rows(
        self,
        *,
        tenant: str,
        kind: str | None = None,
        chunk_id: str | None = None,
        context: Context | None = None,
    ) -> list[ObjectInfo]:
        """Objects of a tenant, oldest first."""
        wanted: dict[str, str | None] = {"tenant": tenant, "kind": kind, "chunk_id": chunk_id}
        if context is not None:
            wanted.update(vars(context))
        wanted = {name: value for name, value in wanted.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in wanted)
        return [info for info, _ in self._select(where, tuple(wanted.values()))]

    def rebuild(self, objects: Iterable[Stamped]) -> int:
        """Replace all rows by ``objects``, which are drawn while `writing`; how many there are."""
        with self.writing(), self._translated():
            self._db.execute("DELETE FROM objects")
            self._db.executemany(_INSERT, (_row(info, stamp) for info, stamp in objects))
            self._db.execute(f"PRAGMA user_version = {_SCHEMA}")
            return int(self._db.execute("SELECT COUNT(*) FROM objects").fetchone()[0])

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the index against every other writer, of this process and of others.

        A file and its row change together inside; on an exception the rows are as before.
        """
        with self._lock, self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the connection; nothing works afterwards."""
        with self._lock, self._translated():
            self._db.close()

    def _connect(self) -> sqlite3.Connection:
        # made before SQLite opens it, because SQLite would make it readable for everyone
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _switch_to_wal(db)
            db.execute("PRAGMA synchronous = NORMAL")
            if db.execute("PRAGMA user_version").fetchone()[0] not in (0, _SCHEMA):
                raise sqlite3.DatabaseError("it has another schema")
            damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise sqlite3.DatabaseError(damage)
            db.executescript(_TABLE)
        except BaseException:
            db.close()
            raise
        return db

    def _execute(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._lock, self._translated():
            return self._db.execute(sql, values).fetchall()

    def _select(self, where: str, values: tuple[Any, ...]) -> list[Stamped]:
        sql = f"SELECT {_COLUMNS} FROM objects WHERE {where} ORDER BY created, key"
        return [_stamped(row) for row in self._execute(sql, values)]

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"index {self.path}: {error}; if it is damaged, close the store and delete the "
                "file: it is rebuilt on open"
            ) from error


_COLUMNS = (
    "key, kind, chunk_id, fingerprint, anchor, tenant, antecedents, tokens, rank, formed, bytes, "
    "created, stamp"
)
_INSERT = f"INSERT OR REPLACE INTO objects ({_COLUMNS}) VALUES ({', '.join('?' * 13)})"


def _switch_to_wal(db: sqlite3.Connection) -> None:
    # SQLite does not wait for its own timeout here, so two processes that open a new store at the
    # same moment would meet in "database is locked"
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _is_busy(error: sqlite3.DatabaseError) -> bool:
    # Python 3.10 has no error codes
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


def _row(info: ObjectInfo, stamp: str) -> tuple[Any, ...]:
    context = info.context
    return (
        info.key,
        info.kind,
        info.chunk_id,
        context.fingerprint,
        context.anchor,
        context.tenant,
        json.dumps(info.antecedents),
        info.tokens,
        info.rank,
        info.formed,
        info.bytes,
        info.created,
        stamp,
    )


def _stamped(row: tuple[Any, ...]) -> Stamped:
    key, kind, chunk, fingerprint, anchor, tenant, antecedents, tokens, rank, formed = row[:10]
    info = ObjectInfo(
        key=key,
        kind=kind,
        chunk_id=chunk,
        context=Context(fingerprint, anchor, tenant),
        antecedents=tuple(json.loads(antecedents)),
        tokens=tokens,
        rank=rank,
        formed=formed,
        bytes=row[10],
        created=row[11],
    )
    return info, row[12]
