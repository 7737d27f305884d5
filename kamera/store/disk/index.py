"""The index: one row per object, so that listing never opens the objects; and the objects' uses.

It only repeats the files' headers: it is a cache, and a look-up by key does not need it. A process compares
the names of rows and files once, when it first asks. After that rows are written behind their files; the
names in the traces of writers (`traces`), who may have died, and every row whose file is another by now are
read anew. Where the database cannot be used (it is locked, or the disk is full or read-only), the same
rows are made in memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kamera.errors import StoreError
from kamera.store.codec import Codec
from kamera.store.disk.database import Database, Dropped, Unusable
from kamera.store.disk.files import ObjectFiles
from kamera.store.disk.notes import Notes
from kamera.store.disk.rows import COLUMNS, FIELDS, INSERT, WEIGHED, Stamped, columns_of, read_row, row_of
from kamera.store.info import ALL, Census, KindCount, ObjectInfo, Selection, Weighed
from kamera.store.keys import KINDS, Context, is_key

logger = logging.getLogger(__name__)

_PAGE = 1000  # rows read at a time: other threads may run between two pages
_BATCH = 256  # rows corrected in one transaction
_RETRY_SECONDS = 5.0  # after these an unusable database is tried again


class Index:
    """The rows of a directory's objects. Safe to use from several threads and processes.

    A query raises the errors of ``files``, as `StoreError`, but none of the database.
    """

    def __init__(
        self,
        path: Path,
        files: ObjectFiles,
        codec: Codec | None = None,
        clock: Callable[[], float] = time.time,
        read_only: bool = False,
    ) -> None:
        self.path = path
        self._files = files
        self._codec = Codec() if codec is None else codec
        self._db = Database(path)
        self.notes = Notes(self._db, clock, read_only=read_only)
        self._memory = Database(None)
        self._lock = threading.Lock()  # for the attributes below
        self._connection: Any = None  # the connection whose rows were compared with the files
        self._read_only = read_only
        self._again = float("inf") if read_only else 0.0  # time at which the database is tried again
        self._doubtful_keys: set[str] = set()
        self._is_closed = False

    # -- changes -------------------------------------------------------------------------------

    def put(self, rows: Sequence[Stamped]) -> bool:
        """Write the rows of objects whose files are in place; False if they are written later."""
        return self._change([info.key for info, _ in rows], [row_of(*row, self._codec) for row in rows])

    def drop(self, key: str) -> bool:
        """Delete the row of ``key``, if present; otherwise as `put`."""
        return self._change([key], [])

    def mark_doubtful(self, keys: Iterable[str]) -> None:
        """Note changes of files: their rows are corrected before the next query."""
        with self._lock:
            self._doubtful_keys.update(keys)
            is_due = len(self._doubtful_keys) >= 2 * _BATCH
        if is_due:
            with contextlib.suppress(StoreError):
                self._settle(self._database())

    def correct_rows(self, keys: Iterable[str]) -> bool:
        """Correct the rows of ``keys`` from their files; False if that cannot be done now."""
        with contextlib.suppress(Unusable):
            if time.monotonic() >= self._again:
                self._correct(self._db, keys)
                return True
        self.mark_doubtful(keys)
        return False

    def correct_all_rows(self, *, afresh: bool = False) -> int:
        """Compare every row with its file, or make it anew; return the number of rows."""
        while True:
            try:
                self._ask("SELECT 1")  # names and tables agree
                db = self._database()
                self._correct(db, {*self._files.names(), *self.keys()}, afresh=afresh)
                return int(self._ask("SELECT COUNT(*) FROM objects")[0][0])
            except Dropped:  # damage, met on the way: it is empty now
                continue
            except OSError as error:
                raise self._listing_error(error) from error

    def erase_deleted(self) -> str | None:
        """Erase deleted rows, in the log too; return None, or the possible remains and the reason."""
        try:
            self._ask("SELECT 1")
            return self._db.erase_deleted()
        except StoreError as error:
            return str(error)

    def close(self) -> None:
        """Write all pending data, and close the database."""
        if self._is_closed:
            return
        self.notes.flush()
        with contextlib.suppress(StoreError, OSError):
            if self._doubtful_keys:
                self._settle(self._database())
        self._is_closed = True
        self._db.close()
        self._memory.close()

    # -- queries -------------------------------------------------------------------------------

    def get(self, key: str) -> Stamped | None:
        """The row of ``key``, not compared with its file; None if absent or unreadable."""
        with contextlib.suppress(Unusable):
            for row in self._database().execute(f"SELECT {COLUMNS} FROM objects WHERE key = ?", (key,)):
                return read_row(row, self._codec)
        return None

    def keys(self) -> set[str]:
        """The keys of all rows, not compared with the files."""
        with contextlib.suppress(Unusable):
            return {str(key) for (key,) in self._database().execute("SELECT key FROM objects")}
        return set()

    def iterate(self, tenant: str, selection: Selection = ALL) -> Iterator[ObjectInfo]:
        """Objects of a tenant, oldest first, read in pages."""
        kind, chunk_id, context, limit, offset = selection
        column_values = {} if context is None else columns_of(context, self._codec)
        column_values["tenant"] = self._codec.seal_id(tenant)
        column_values.update({} if chunk_id is None else {"chunk_id": self._codec.seal_id(chunk_id)})
        column_values.update({} if kind is None else {"kind": kind})
        where = " AND ".join(f"{name} = ?" for name in column_values)
        last_place: tuple[Any, ...] = ()
        objects_left = float("inf") if limit is None else limit
        while objects_left > 0:
            count = int(min(_PAGE, objects_left))
            page = "AND (created, key) > (?, ?)" if last_place else ""
            sql = f"SELECT {COLUMNS} FROM objects WHERE {where} {page} ORDER BY created, key LIMIT ? OFFSET ?"
            rows = self._ask(sql, (*column_values.values(), *last_place, count, 0 if last_place else offset))
            for info in self._objects_of(rows):
                if selection.selects(info):
                    objects_left -= 1
                    yield info
            if len(rows) < count:
                return
            last = Weighed(*rows[-1][: len(FIELDS)])
            last_place = last.created, last.key

    def canonicals(self, context: Context) -> list[str]:
        """Names of the canonicals of a context, in no order; no row is read for it."""
        column_values = columns_of(context, self._codec)
        where = " AND ".join(f"{name} = ?" for name in column_values)
        sql = f"SELECT key FROM objects WHERE kind = 'canonical' AND {where}"
        return [key for (key,) in self._ask(sql, tuple(column_values.values()))]

    def kinds(self, tenant: str) -> dict[str, KindCount]:
        """Number and bytes of a tenant's objects of each kind; no row is read for it."""
        sql = "SELECT kind, COUNT(*), SUM(bytes) FROM objects WHERE tenant = ? GROUP BY kind"
        counts = {kind: KindCount(*count) for kind, *count in self._ask(sql, (self._codec.seal_id(tenant),))}
        return {kind: counts.get(kind, KindCount(0, 0)) for kind in KINDS}

    def census(self, tenant: str, kind: str | None = None) -> Census:
        """A count of a tenant's objects, by their rows."""
        rows = [row for row in self.weigh(tenant) if kind in (None, row.kind)]
        census = Census.of(rows, KINDS if kind is None else (kind,))
        return replace(census, forms={self._codec.open_id(kv): count for kv, count in census.forms.items()})

    def bytes(self) -> int:
        """The bytes of all objects, of all tenants."""
        return int(self._ask("SELECT COALESCE(SUM(bytes), 0) FROM objects")[0][0])

    def weigh(self, tenant: str | None = None) -> Iterator[Weighed]:
        """All objects of a tenant (None: of all tenants) with their uses, in no order; ids stay sealed."""
        self.notes.flush()
        # the plus keeps SQLite on the primary key: by tenant it would sort the whole store for every page
        only = "" if tenant is None else "AND +tenant = ?"
        mine = () if tenant is None else (self._codec.seal_id(tenant),)
        after = ""
        while rows := self._ask(f"{WEIGHED} WHERE key > ? {only} ORDER BY key LIMIT {_PAGE}", (after, *mine)):
            yield from (Weighed(*row) for row in rows)
            after = rows[-1][0]

    # -- inside --------------------------------------------------------------------------------

    def _database(self) -> Database:
        """The database in use now."""
        return self._db if time.monotonic() >= self._again else self._memory

    def _change(self, keys: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> bool:
        while time.monotonic() >= self._again:
            try:
                with self._db.writing() as db:
                    if rows:
                        db.executemany(INSERT, rows)
                    else:
                        _delete(db, keys[0])
                with self._lock:
                    self._doubtful_keys.difference_update(keys)
                return True
            except Dropped:
                continue
            except Unusable as error:
                logger.warning("the row of %s is written later: %s", ", ".join(keys), error)
                self._again = time.monotonic() + _RETRY_SECONDS
        with self._lock:
            self._doubtful_keys.update(keys)
        return False

    def _ask(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """Rows of one statement, from a database that agrees with the files."""
        while True:
            if self._is_closed:
                raise StoreError(f"store {self.path.parent} is closed: open it again")
            db = self._database()
            try:
                connection = self._agree(db)
                rows = db.execute(sql, values)
                if db.connection is connection:  # else it was replaced meanwhile
                    return rows
            except Dropped:
                continue
            except Unusable as error:
                if db is self._memory:
                    raise
                logger.warning("listing from the files for now: %s", error)
                self._again = time.monotonic() + _RETRY_SECONDS
            except OSError as error:
                raise self._listing_error(error) from error

    def _agree(self, db: Database) -> Any:
        """Bring the rows of ``db`` into agreement with the files; return its connection."""
        db.execute("SELECT 1")
        connection = db.connection
        if connection is not self._connection or db is self._memory:  # which no other process writes to
            row_keys = {str(key) for (key,) in db.execute("SELECT key FROM objects")}
            self._correct(db, row_keys.symmetric_difference(self._files.names()))
            self._connection = connection
        self._settle(db)
        return connection

    def _settle(self, db: Database) -> None:
        """Correct the rows that are doubtful."""
        with self._lock:
            keys, self._doubtful_keys = self._doubtful_keys, set()
        try:
            self._correct(db, keys.union(self._files.names_in_traces()))
        except BaseException:
            self.mark_doubtful(keys)
            raise

    def _correct(self, db: Database, keys: Iterable[str], *, afresh: bool = False) -> None:
        """Make rows anew that are not of their files, or all of them."""
        names = sorted(keys)
        for start in range(0, len(names), _BATCH):
            new_rows: dict[str, tuple[str | None, Stamped | None]] = {}
            for key in names[start : start + _BATCH]:
                stamp = self._stamp(key)
                rows = db.execute(f"SELECT {COLUMNS} FROM objects WHERE key = ?", (key,))
                old_row = read_row(rows[0], self._codec) if rows else None
                if afresh or len(rows) != (stamp is not None) or (old_row and old_row[1]) != stamp:
                    new_rows[key] = stamp, None if stamp is None else self._files.row(key)
            if not new_rows:
                continue
            with db.writing() as writer:
                for key, (stamp, new_row) in new_rows.items():
                    now = self._stamp(key)
                    if new_row is not None and new_row[1] == now:
                        writer.execute(INSERT, row_of(*new_row, self._codec))
                    elif now == stamp:  # else it was replaced meanwhile: that writer's row follows
                        _delete(writer, key)

    def _objects_of(self, rows: Iterable[tuple[Any, ...]]) -> Iterator[ObjectInfo]:
        """The objects of rows; one that is not of its file is read from that."""
        for row in rows:
            info_and_stamp = read_row(row, self._codec)
            try:
                stamp = self._stamp(row[0])
                if info_and_stamp is None or info_and_stamp[1] != stamp:
                    self.mark_doubtful([row[0]])
                    info_and_stamp = None if stamp is None else self._files.row(row[0])
            except OSError as error:
                raise self._listing_error(error) from error
            if info_and_stamp is not None:
                yield info_and_stamp[0]

    def _listing_error(self, error: OSError) -> StoreError:
        return StoreError(f"store {self.path.parent}: cannot list the objects: {error}")

    def _stamp(self, key: str) -> str | None:
        return self._files.stamp(key) if is_key(key) else None  # the key may be damaged


def _delete(db: Any, key: str) -> None:
    for table in ("objects", "uses", "sent"):
        db.execute(f"DELETE FROM {table} WHERE key = ?", (key,))
