"""Pins: objects that `gc` must not take, until they are let go or their time is over.

They lie in a file of their own beside the index, because they cannot be made anew from the objects:
a lost index costs time, a lost pin costs what it kept.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kamera.errors import PinsFull, StoreError
from kamera.store.disk.database import exists

PINS = "pins.sqlite"
"""What the file is called in a store directory."""

_TABLES = """
CREATE TABLE IF NOT EXISTS pins (name TEXT PRIMARY KEY, bytes INTEGER NOT NULL, expires REAL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cap (bytes INTEGER NOT NULL);
"""
_BUSY_SECONDS = 60.0


@dataclass(frozen=True)
class Pin:
    """One pinned object: its size when it was pinned, and until when (seconds since 1970; None: for good)."""

    name: str
    bytes: int
    expires: float | None


class PinBook(Protocol):
    """Where the pins of a store are kept. Safe to use from several threads."""

    def pin(self, objects: Iterable[tuple[str, int]], ttl: float | None = None) -> None:
        """Pin objects (name, bytes), all or none; those pinned already get the new ``ttl`` (seconds).

        Raises `PinsFull` when the pinned bytes would exceed `cap`, `ValueError` for a ``ttl`` that is none.
        """
        ...

    def unpin(self, names: Iterable[str]) -> int:
        """Let objects go; how many of them were pinned."""
        ...

    def is_pinned(self, name: str) -> bool:
        """Whether ``name`` is pinned now."""
        ...

    def list(self) -> list[Pin]:
        """All pins that hold now, by name."""
        ...

    @property
    def cap(self) -> int | None:
        """Most bytes that may be pinned at once; None for no such limit."""
        ...

    def set_cap(self, cap: int | None) -> None:
        """Bound the bytes of future pins; what is pinned stays. `ValueError` for what is no size."""
        ...


def check_ttl(ttl: float | None) -> None:
    """`ValueError` for a time that no pin can last."""
    if ttl is not None and not ttl > 0:
        raise ValueError(f"a pin lasts more than 0 seconds, got {ttl}")


def check_cap(cap: int | None) -> None:
    """`ValueError` for what is no number of bytes."""
    if cap is not None and cap < 0:
        raise ValueError(f"a cap is a number of bytes, got {cap}")


def over_cap(held: int, cap: int) -> PinsFull:
    """The refusal of pins that would make ``held`` bytes."""
    return PinsFull(f"{held} bytes would be pinned, over the cap of {cap}: unpin something, or raise the cap")


class Pins:
    """The pins of one store directory, for all its tenants. Safe to use from threads and processes.

    The file appears with the first pin. A pin is on the disk when `pin` returns. Raises `StoreError`
    when the file is damaged or cannot be written: nothing is taken for unpinned because of it.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock

    def pin(self, objects: Iterable[tuple[str, int]], ttl: float | None = None) -> None:
        """See `PinBook`."""
        check_ttl(ttl)
        expires = None if ttl is None else self._clock() + ttl
        rows = [(name, size, expires) for name, size in objects]
        with self._changing() as db:
            db.execute("DELETE FROM pins WHERE expires <= ?", (self._clock(),))
            db.executemany("INSERT OR REPLACE INTO pins VALUES (?, ?, ?)", rows)
            [[held]] = db.execute("SELECT COALESCE(SUM(bytes), 0) FROM pins")
            cap = _cap(db)
            if cap is not None and held > cap:
                raise over_cap(held, cap)

    def unpin(self, names: Iterable[str]) -> int:
        """Let objects go; how many of them were pinned."""
        if not exists(self.path):
            return 0
        with self._changing() as db:
            gone = [db.execute("DELETE FROM pins WHERE name = ?", (name,)).rowcount for name in names]
            db.execute("DELETE FROM pins WHERE expires <= ?", (self._clock(),))
        return sum(gone)

    def is_pinned(self, name: str) -> bool:
        """Whether ``name`` is pinned now."""
        rows = self._read("SELECT 1 FROM pins WHERE name = ? AND (expires IS NULL OR expires > ?)", name)
        return bool(rows)

    def list(self) -> list[Pin]:
        """All pins that hold now, by name."""
        rows = self._read(
            "SELECT name, bytes, expires FROM pins WHERE expires IS NULL OR expires > ? ORDER BY name"
        )
        return [Pin(*row) for row in rows]

    @property
    def cap(self) -> int | None:
        """Most bytes that may be pinned at once; None for no such limit."""
        if not exists(self.path):
            return None
        with self._opened() as db:
            return _cap(db)

    def set_cap(self, cap: int | None) -> None:
        """See `PinBook`; for every process."""
        check_cap(cap)
        with self._changing() as db:
            db.execute("DELETE FROM cap")
            if cap is not None:
                db.execute("INSERT INTO cap VALUES (?)", (cap,))

    def _read(self, sql: str, *values: str) -> Sequence[tuple[str, int, float | None]]:
        if not exists(self.path):  # looking makes no file
            return []
        with self._opened() as db:
            return db.execute(sql, (*values, self._clock())).fetchall()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        with self._opened() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """A connection for one operation: pins are rare, and a thread or fork needs no care of it."""
        try:
            # made before SQLite opens it, because SQLite would make it readable for everyone
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            with contextlib.closing(
                sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
            ) as db:
                db.execute("PRAGMA synchronous = FULL")
                db.execute("PRAGMA secure_delete = ON")  # what was forgotten leaves no name behind
                db.executescript(_TABLES)
                yield db
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"pins {self.path}: {error}; if it is damaged, delete the file and pin again: until then "
                "nothing is collected"
            ) from error


def _cap(db: sqlite3.Connection) -> int | None:
    row = db.execute("SELECT bytes FROM cap").fetchone()
    return None if row is None else int(row[0])
