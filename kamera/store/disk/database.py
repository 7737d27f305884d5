"""A SQLite file that many threads and processes share, and that may be thrown away at any time.

What is in it can be made anew, so damage is no error here: whoever meets it first replaces the file
and has it filled again, and all who hold the old one follow.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kamera.errors import StoreError
from kamera.store.disk.locks import locked_folder
from kamera.store.disk.scrub import scrub

logger = logging.getLogger(__name__)

_BUSY_SECONDS = 60.0  # another process may be filling it
Result = TypeVar("Result")


class Database:
    """One file in WAL mode, of ``tables`` in version ``schema``; any other version is thrown away.

    ``refill`` is called after a damaged or lost file was replaced by an empty one in mid-use; after
    the constructor the caller looks at `version` itself. Opening reads the first pages only, however
    large the file is. Raises `StoreError` when SQLite fails.
    """

    def __init__(self, path: Path, schema: int, tables: str, refill: Callable[[], None]) -> None:
        self.path = path
        self._schema = schema
        self._tables = tables
        self._refill = refill
        self._lock = threading.RLock()
        self._writing = self._filling = self._unfilled = False
        self._damage: sqlite3.DatabaseError | None = None  # met inside `writing`
        self._db: sqlite3.Connection
        self._file: tuple[int, int]
        with self._translated(), self._alone():
            try:
                self._connect()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._start_over(error)

    @property
    def version(self) -> int:
        """What `writing` code set as user_version; 0 in a new file."""
        return int(self.execute("PRAGMA user_version")[0][0])

    def execute(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """Rows of one statement.

        Damage is repaired and the statement run again; inside `writing` it waits for the end of the
        transaction, and the statement has no rows.
        """

        def run() -> list[Any]:
            return self._db.execute(sql, values).fetchall()

        with self._lock, self._translated():
            if not self._writing:
                return self._repairing(run)
            try:
                return [] if self._damage else run()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._damage = error
                return []

    def execute_many(self, sql: str, values: Any) -> None:
        """One statement for each of ``values`` (drawn one by one), inside `writing`."""
        with self._lock, self._translated():
            try:
                if self._damage is None:
                    self._db.executemany(sql, values)
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._damage = error

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file against every other writer, of this process and of others.

        On an exception the rows are as before. Where the file turns out damaged, it is filled anew at
        the end instead.
        """
        with self._lock, self._translated():
            self._repairing(self._begin)
            self._damage, self._writing = None, True
            try:
                yield
            except BaseException:
                self._end("ROLLBACK")
                raise
            finally:
                self._writing = False
            try:
                self._end("ROLLBACK" if self._damage else "COMMIT")
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    self._end("ROLLBACK")
                    raise
                self._damage = error
            if self._damage is not None:
                self._repair(self._damage)

    @contextlib.contextmanager
    def impatient(self) -> Iterator[None]:
        """Inside, a file that another process holds is an error at once."""
        with self._lock, self._translated():
            self._db.execute("PRAGMA busy_timeout = 0")
            try:
                yield
            finally:
                self._db.execute(f"PRAGMA busy_timeout = {int(_BUSY_SECONDS * 1000)}")

    def damaged(self, why: str) -> None:
        """Say that what was read makes no sense: replace the file and have it filled anew."""
        with self._lock, self._translated():
            self._repair(sqlite3.DatabaseError(why))

    def scrub(self) -> str | None:
        """See `scrub.scrub`."""
        with self._lock, self._translated():
            return self._repairing(lambda: scrub(self._db, self.path))

    def close(self) -> None:
        """Close the connection; nothing works afterwards."""
        with self._lock, self._translated():
            self._db.close()

    def _connect(self) -> None:
        # made before SQLite opens it, because SQLite would make it readable for everyone
        with open(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)) as file:
            self._file = _identity(os.fstat(file.fileno()))
        db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            _switch_to_wal(db)
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA secure_delete = ON")  # of the connection, not of the file
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, self._schema):
                raise sqlite3.DatabaseError(f"it is of schema {version}, not {self._schema}")
            if version == 0:  # else a table that is missing is damage
                db.executescript(self._tables)
        except UnicodeDecodeError as error:  # SQLite names what it found damaged
            db.close()
            raise sqlite3.DatabaseError(f"its schema is no text: {error}") from error
        except BaseException:
            db.close()
            raise
        self._db = db

    def _begin(self) -> None:
        self._end("ROLLBACK")  # of a transaction whose end failed
        self._db.execute("BEGIN IMMEDIATE")
        if self._is_current():
            return
        self._end("ROLLBACK")  # replaced while this waited: the rows would be lost with the old file
        self._follow()
        self._begin()

    def _end(self, how: str) -> None:
        if self._db.in_transaction:  # some errors have rolled back already
            self._db.execute(how)

    def _repairing(self, call: Callable[[], Result]) -> Result:
        """``call``, and once more if it met damage."""
        try:
            if not self._is_current():
                self._follow()
            elif self._unfilled and not self._filling:
                self._fill()  # the last attempt was interrupted
            return call()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            self._repair(error)
            return call()

    def _is_current(self) -> bool:
        """Whether the file that is open still is the one at the path."""
        try:
            return _identity(os.stat(self.path)) == self._file
        except FileNotFoundError:
            return False
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error

    def _follow(self) -> None:
        """Open the file that someone put in place of the one that is open."""
        with self._alone():
            self._db.close()
            self._connect()
        if self._db.execute("PRAGMA user_version").fetchone()[0] != self._schema:
            self._fill()

    def _repair(self, error: sqlite3.DatabaseError) -> None:
        if self._filling:  # the new file is no better
            raise error
        self._end("ROLLBACK")
        with self._alone():
            if self._is_current():
                self._start_over(error)
            else:  # another process was faster
                self._db.close()
                self._connect()
        self._fill()

    def _fill(self) -> None:
        self._filling = self._unfilled = True
        try:
            self._refill()
            self._unfilled = False
        finally:
            self._filling = False

    def _start_over(self, error: sqlite3.DatabaseError) -> None:
        logger.warning("%s is unreadable (%s): starting over", self.path, error)
        # unlinked before it is closed: then SQLite leaves the new file's log alone
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        with contextlib.suppress(AttributeError, sqlite3.Error):
            self._db.close()
        self._connect()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No two processes replace or open the file at once."""
        try:
            with locked_folder(self.path.parent):
                yield
        except OSError as error:
            raise sqlite3.OperationalError(str(error)) from error

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(
                f"index {self.path}: {error}; if it is damaged, close the store and delete the "
                "file: it is rebuilt on open"
            ) from error


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    # Python 3.10 has no error codes; it raises the bare class for a file that is malformed or no database
    return type(error) is sqlite3.DatabaseError or str(error).startswith(("no such table", "no such column"))


def _is_busy(error: sqlite3.DatabaseError) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)


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


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[None]:
    """What the operating system refuses about ``path`` as a `StoreError`."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path} cannot be reached: {error}") from error


def exists(path: Path) -> bool:
    """Whether there is such a file. Raises StoreError when the operating system will not tell."""
    with reachable(path):
        return path.exists()
