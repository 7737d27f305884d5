"""The SQLite file of a directory's index: plain, opened when it is used, and dropped on any doubt.

Its contents are made anew from the objects, so damage is no error here. Nothing but SQLite opens the file:
POSIX drops a process's locks as soon as it closes any descriptor of a locked file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kamera import forks
from kamera.errors import StoreError
from kamera.files import lock_path
from kamera.store.disk.rows import SCHEMA, TABLES

logger = logging.getLogger(__name__)

PATIENCE = 2.0
"""Seconds to wait for another writer."""


class Unusable(StoreError):
    """The database cannot be used now: it is locked, or the disk is full, read-only or broken."""


class Dropped(Unusable):
    """The database was damaged, and has been removed: an empty one takes its place."""


class Database:
    """One file in WAL mode, in memory if ``path`` is None; safe to use from several threads and processes.

    A file that is damaged, or of another schema, is removed and made anew, and so is one that was replaced:
    all who use it follow. Raises `Unusable`.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.connection: Any = None
        """The one in use; another one after the file was replaced, whose rows are to be made anew."""
        self._file: tuple[int, int] | None = None
        self._lock = threading.RLock()
        self._is_closed = False

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows of one statement, outside `writing`."""
        with self._usable():
            return list(self._current().execute(sql, values).fetchall())

    @contextlib.contextmanager
    def writing(self) -> Iterator[Any]:
        """A transaction, by its connection, which excludes every other writer; an exception undoes it."""
        with self._usable():
            while True:
                db = self._current()
                db.execute("BEGIN IMMEDIATE")
                if db is self._current():
                    break  # else it was replaced meanwhile: rows would be lost with the old file
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # some errors have rolled back already
                    with contextlib.suppress(sqlite3.Error):
                        db.execute("ROLLBACK")
                raise

    def erase_deleted(self) -> str | None:
        """Rewrite it, since SQLite leaves copies of moved rows; None, or a line on what may remain."""
        with self._usable():
            db, why = self._current(), None
            db.execute("PRAGMA temp_store = MEMORY")  # its intermediate copy is not a file
            try:
                db.execute("VACUUM")
                # the rows are in the log now: only the checkpoint's result tells if they reached the file
                [busy, _, _] = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
                why = "somebody reads it" if busy else None
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) and "busy" not in str(error):
                    raise
                why = str(error)
            name = "" if self.path is None else self.path.name
            notice = f"deleted rows may still be in {name} and {name}-wal ({why}): end that, and run it again"
            return notice if why else None

    def close(self) -> None:
        """Close it; any later use raises `Unusable`."""
        with self._lock:
            self._disconnect()
            self._is_closed = True

    def _current(self) -> Any:
        """The connection to the file that is at the path now."""
        if self._is_closed:
            raise sqlite3.OperationalError("it is closed")
        if self.connection is None or (self.path is not None and _identity(self.path) != self._file):
            self._connect()
        return self.connection

    def _connect(self) -> None:
        self._disconnect()
        if self.path is None:
            self.connection = _make(":memory:")
            return
        with lock_path(self.path.parent, PATIENCE):
            if self.path.is_symlink():
                raise OSError(f"{self.path} is a link, and a store follows no links: remove it")
            with contextlib.suppress(FileExistsError):  # SQLite would make it readable by everyone
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            self._file = _identity(self.path)
            self.connection = _make(self.path)

    def _disconnect(self) -> None:
        if self.connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self.connection.close()
        self.connection = self._file = None

    def _remove(self, error: Exception) -> None:
        """Remove the file in use, unless another is in its place by now."""
        path = self.path
        if path is None:
            raise error
        with lock_path(path.parent, PATIENCE):
            if self._file == _identity(path):
                logger.warning("%s is unreadable (%s): starting over", path, error)
                # before it is closed: then SQLite leaves the new file's log alone
                for suffix in ("", "-wal", "-shm"):
                    Path(f"{path}{suffix}").unlink(missing_ok=True)
        self._disconnect()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            with self._lock, forks.hold_off_forks():
                try:
                    yield
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise
                    self._remove(error)
                    raise Dropped(f"{self.path} was damaged: {error}") from error
        except (sqlite3.Error, OSError) as error:
            raise Unusable(f"{self.path} cannot be used now: {error}") from error


def _make(path: Path | str) -> sqlite3.Connection:
    """A connection to a file whose tables are made if it is empty. Raises `sqlite3.Error`."""
    db = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        for setting in (
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "secure_delete = ON",  # of the connection, not of the file
            "cache_size = -32768",  # KiB: keys are random, and so are their pages
        ):
            db.execute(f"PRAGMA {setting}")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            db.executescript(f"BEGIN IMMEDIATE;{TABLES};PRAGMA user_version = {SCHEMA};COMMIT")
        elif version != SCHEMA:
            raise sqlite3.DatabaseError(f"it is of schema {version}, not {SCHEMA}")
    except UnicodeDecodeError as error:  # SQLite's message quotes the damaged bytes
        db.close()
        raise sqlite3.DatabaseError(f"its schema is no text: {error}") from error
    except BaseException:
        db.close()
        raise
    return db


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    # Python 3.10 has no error codes; it raises the bare class for a malformed file or no database
    damage = ("no such table", "no such column", "Could not decode")
    return type(error) is sqlite3.DatabaseError or str(error).startswith(damage)
