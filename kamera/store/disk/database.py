"""A SQLite file that many threads and processes share, and that may be discarded at any time.

Its contents can be rebuilt, so damage is not an error here: the process that meets it puts an empty file
in its place, and all holders of the old one follow (`Database.generation`). Nothing here opens the file
itself: POSIX drops a process's locks as soon as it closes any descriptor of a locked file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kamera import forks
from kamera.errors import StoreError
from kamera.store.disk.locks import folder_locked
from kamera.store.disk.marker import ASIDE
from kamera.store.disk.scrub import scrub

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 5.0  # a writer's wait for another
_SUFFIXES = ("", "-wal", "-shm")


class Unusable(StoreError):
    """The database cannot be used now: it is locked, or the disk is full, read-only or broken."""


class Emptied(Unusable):
    """The database was damaged and is empty now: the writer must start again."""


class Database:
    """One file in WAL mode, of ``tables`` in version ``schema``; any other version is discarded.

    ``path`` None: in memory. Nothing is opened before it is used. Readers never wait for a writer.
    Safe to use from several threads and processes. Raises `Unusable`.
    """

    def __init__(self, path: Path | None, schema: int, tables: str) -> None:
        self.path = path
        self.generation = 0
        """Changes whenever the file proves to be a different one."""
        self._schema = schema
        self._tables = tables
        self._lock = threading.RLock()  # for writing, and for changing the connection
        self._reading = self._lock if path is None else threading.RLock()  # taken after the other
        self._owner = 0  # the thread inside `writing`
        self._file: tuple[int, int] | None = None
        self._reader: Any = None
        self._writer: Any = None
        self._waits: tuple[Any, float] = (None, 0.0)  # the connection and how long it waits for a writer
        self._closed = False

    @classmethod
    def copy_of(cls, path: Path, schema: int, tables: str, *, immutable: bool = False) -> Database:
        """A copy in memory of the file as it is now; empty if the file cannot be read.

        ``immutable``: for a folder that cannot be written, in which SQLite cannot place its locks.
        """
        made = cls(None, schema, tables)
        with contextlib.suppress(sqlite3.Error, OSError), forks.steady():
            how = "mode=ro&immutable=1" if immutable else "mode=ro"
            with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?{how}", uri=True)) as source:
                if source.execute("PRAGMA user_version").fetchone()[0] == schema:
                    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
                    source.backup(copy)
                    if copy.execute("PRAGMA integrity_check(1)").fetchone()[0] == "ok":
                        made._reader = made._writer = copy
                        made.generation = 1
        return made

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """Rows of one statement, which inside `writing` is part of that; a damaged file is emptied first."""
        with self._translated():
            if self._owner == threading.get_ident():
                return list(self._writer.execute(sql, values).fetchall())
            self._follow()
            try:
                return self._read(sql, values)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._start_over(error)
            return self._read(sql, values)

    def execute_many(self, sql: str, values: Any) -> None:
        """One statement for each of ``values`` (drawn one by one), inside `writing`."""
        with self._translated():
            self._writer.executemany(sql, values)

    @contextlib.contextmanager
    def writing(self, seconds: float = _BUSY_SECONDS) -> Iterator[None]:
        """Exclude every other writer, after waiting for it at most ``seconds``.

        On an exception the rows are as before. Raises `Emptied` if the file proves damaged.
        """
        with self._lock, self._emptying(), self._translated():
            self._follow()
            if self._waits != (self._writer, seconds):
                self._writer.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
                self._waits = self._writer, seconds
            self._begin()
            self._owner = threading.get_ident()
            try:
                yield
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:  # some errors have rolled back already
                    with contextlib.suppress(sqlite3.Error):
                        self._writer.execute("ROLLBACK")
                raise
            finally:
                self._owner = 0

    def problem(self) -> str | None:
        """Read all of it; return the fault, if any, after which the file is empty."""
        found = str(self.execute("PRAGMA integrity_check(1)")[0][0])
        if found == "ok":
            return None
        self.damaged(found)
        return found

    def damaged(self, why: str) -> None:
        """Report that its contents are invalid: an empty file takes its place."""
        with self._translated():
            self._start_over(sqlite3.DatabaseError(why))

    def scrub(self) -> str | None:
        """See `scrub.scrub`."""
        with self._lock, self._emptying(), self._translated():
            self._follow()
            return None if self.path is None else scrub(self._writer, self.path)

    def close(self) -> None:
        """Close it; any later use raises `Unusable`."""
        with self._lock, self._reading:
            self._disconnect()
            self._closed = True

    def _read(self, sql: str, values: tuple[Any, ...]) -> list[Any]:
        """Rows by the writer's connection while no thread writes, else by a new one."""
        if self._lock.acquire(blocking=False):
            try:
                return list(self._writer.execute(sql, values).fetchall())
            finally:
                self._lock.release()
        with self._reading:
            if self._reader is None and self.path is not None:
                self._reader = self._connection(self.path)
            return list(self._reader.execute(sql, values).fetchall())

    def _disconnect(self) -> None:
        with self._lock, self._reading, forks.steady():
            for held in {id(db): db for db in (self._reader, self._writer) if db is not None}.values():
                with contextlib.suppress(sqlite3.Error):
                    held.close()
            self._reader = self._writer = self._file = None

    def _follow(self) -> None:
        """Connect to the file that is at the path now."""
        if not self._is_current():
            with self._lock, self._reading:
                if not self._is_current():
                    self._connect()

    def _is_current(self) -> bool:
        if self._writer is None:
            return False
        return self.path is None or _identity(self.path) == self._file

    def _connect(self) -> None:
        self._disconnect()
        if self._closed:
            raise sqlite3.OperationalError("it is closed")
        if self.path is None:
            db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            db.executescript(f"{self._tables};PRAGMA user_version = {self._schema}")
            self._reader = self._writer = db
        else:
            with folder_locked(self.path.parent, _BUSY_SECONDS):
                try:
                    self._open(self.path)
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        self._disconnect()
                        raise
                    self._throw_away(self.path, error)
                    self._open(self.path)
        self.generation += 1

    def _open(self, path: Path) -> None:
        _make(path)
        self._file = _identity(path)
        try:
            self._writer = self._connection(path)
            self._writer.execute("PRAGMA cache_size = -32768")  # KiB: keys are random, and so are their pages
            version = self._writer.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._writer.executescript(
                    f"BEGIN IMMEDIATE;{self._tables};PRAGMA user_version = {self._schema};COMMIT"
                )
            elif version != self._schema:
                raise sqlite3.DatabaseError(f"it is of schema {version}, not {self._schema}")
        except UnicodeDecodeError as error:  # SQLite's message quotes the damaged bytes
            raise sqlite3.DatabaseError(f"its schema is no text: {error}") from error

    def _connection(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _switch_to_wal(db)
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA secure_delete = ON")  # a setting of the connection, not of the file
        except BaseException:
            db.close()
            raise
        return db

    def _begin(self) -> None:
        while True:
            self._writer.execute("BEGIN IMMEDIATE")
            if self._is_current():
                return
            self._writer.execute("ROLLBACK")  # replaced meanwhile: rows would be lost with the old file
            self._follow()

    @contextlib.contextmanager
    def _emptying(self) -> Iterator[None]:
        try:
            yield
        except Unusable as error:
            cause = error.__cause__
            if not isinstance(cause, sqlite3.DatabaseError) or not _is_damage(cause):
                raise
            with self._translated():
                self._start_over(cause)
            raise Emptied(str(error)) from error

    def _start_over(self, error: sqlite3.DatabaseError) -> None:
        """Put an empty file in the place of the damaged one, unless another process has done so."""
        path, damaged = self.path, self._file
        if path is None:
            raise error
        with self._lock, self._reading:
            with folder_locked(path.parent, _BUSY_SECONDS):
                if self._file == damaged and _identity(path) == damaged:
                    self._throw_away(path, error)
            self._follow()

    def _throw_away(self, path: Path, error: sqlite3.DatabaseError) -> None:
        logger.warning("%s is unreadable (%s): starting over", path, error)
        # unlinked before it is closed: then SQLite leaves the new file's log alone
        for suffix in _SUFFIXES:
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        self._disconnect()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            with forks.steady():
                yield
        except (sqlite3.Error, OSError) as error:
            raise Unusable(f"{self.path} cannot be used now: {error}") from error


def _make(path: Path) -> None:
    """Make the file, readable by its owner only (SQLite would make it readable by everyone); no descriptor
    of it was ever open under this name."""
    if path.is_symlink():
        raise OSError(f"{path} is a link, and a store follows no links: remove it")
    if path.exists():
        return
    aside = path.with_name(f"{ASIDE}{os.getpid()}.{secrets.token_hex(8)}")
    os.close(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    try:
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    # Python 3.10 has no error codes; it raises the bare class for a malformed file or no database
    return type(error) is sqlite3.DatabaseError or str(error).startswith(("no such table", "no such column"))


def _switch_to_wal(db: sqlite3.Connection) -> None:
    # SQLite ignores its own timeout here, so two processes that open a new store at the same moment
    # would fail with "database is locked"
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
