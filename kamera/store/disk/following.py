"""Rows that follow files: the index is brought into agreement with the objects, after any change of either.

Before a query is answered, the folders' times are compared with those at which rows and files were known
to agree. A changed folder is compared name by name. If the database cannot be used (it is locked, or the
disk is full or read-only), the same rows are built in memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kamera.errors import StoreError
from kamera.store.disk.compared import Files, compared
from kamera.store.disk.database import Database, Emptied, Unusable
from kamera.store.disk.rows import COLUMNS, INSERT, SCHEMA, TABLES, RowCodec, Stamped
from kamera.store.keys import is_key

logger = logging.getLogger(__name__)

_BEHIND = 512  # objects whose rows may wait for correction before it is done
_MEND_SECONDS = 1.0  # a listing's wait for a writer, if rows must be corrected
_RETRY_SECONDS = 5.0  # after these an unusable database is tried again
_SETTLED_NS = 100_000_000  # a folder changed more recently may change again with the same timestamp
_MANY = 16  # folders; after so many comparisons their times are written

Known = Callable[[str], dict[str, str]]
"""Returns key and stamp of those rows of a folder that may stay unchanged."""

Result = TypeVar("Result")


class WrongRows(Exception):
    """Rows (by key) that were not written by this store."""

    def __init__(self, keys: list[Any]) -> None:
        super().__init__(keys)
        self.keys = keys


class Following:
    """The rows of a directory's objects in SQLite. Safe to use from several threads and processes.

    ``veil`` and ``unveil`` turn ids into their form in the database, and back; ``sign`` makes the digest of
    a row, keyed in a sealed store (see `Codec`). A listing raises errors of ``files``, as `StoreError`, but
    none of the database.
    """

    def __init__(
        self,
        path: Path,
        files: Files,
        veil: Callable[[str], str] = str,
        unveil: Callable[[str], str] = str,
        sign: Callable[[str], str] = str,
        read_only: bool = False,
    ) -> None:
        self.path = path
        self._files = files
        self._codec = RowCodec(veil, unveil, sign)
        self._read_only = read_only
        self._behind: set[str] = set()  # objects whose rows need correction
        self._held = threading.Lock()  # for the attributes of this object
        self._lock = threading.RLock()  # for comparing a folder, and for changing databases
        self._agreed: dict[str, int] = {}  # folder to the time of its change at which all its rows were right
        self._noted: dict[str, int] = {}  # the same as written in the database
        self._loaded: tuple[Database, int] | None = None  # the database of these, and its generation
        self._db = Database(path, SCHEMA, TABLES)
        self._closed = False
        self._again = 0.0  # time at which an unusable database is tried again
        if read_only:
            self._db = self._copy()

    def put(self, rows: Sequence[Stamped]) -> bool:
        """Write the rows of objects whose files are in place; return True if they are in the database.

        If not, the next listing, in any process, writes them first.
        """

        def put() -> None:
            self._db.execute_many(INSERT, [self._codec.of(info, stamp) for info, stamp in rows])

        return self._change([info.key for info, _ in rows], put)

    def drop(self, key: str) -> bool:
        """Delete the row of ``key``, if present; otherwise as `put`."""

        return self._change([key], lambda: self._delete(key))

    def later(self, key: str) -> None:
        """Note a change of the file of ``key``: its row is corrected with others before the next listing."""
        with self._held:
            self._behind.add(key)
            due = len(self._behind) >= _BEHIND
        if due:
            with contextlib.suppress(Unusable):
                self._settle()

    def settle(self, key: str) -> bool:
        """Correct the row of ``key`` from its file; return True if that was possible now."""
        self.later(key)
        with contextlib.suppress(Unusable):
            self._settle()
        return key not in self._behind

    def moved(self, shard: str, before: int, after: int) -> None:
        """Note a folder's change from ``before`` to ``after`` (ns) that the rows, or `later`, know of."""
        with self._held:
            if self._agreed.get(shard) == before:
                self._agreed[shard] = after

    def rebuild(self) -> int:
        """Rebuild all rows from the files' headers, folder by folder; return their number.

        The recorded uses of remaining objects are kept, and no other caller waits for this.
        """
        with contextlib.suppress(Unusable):
            self._return(now=True)
        self._answer(lambda: None, thorough=self._afresh)
        return int(self._answer(lambda: self._db.execute("SELECT COUNT(*) FROM objects"))[0][0])

    def compare(self) -> None:
        """Compare every row with its file's stamp and its own digest, regardless of the folders' times."""
        self._answer(lambda: None, thorough=self._known)

    def check(self) -> str | None:
        """Read the whole database; return the fault, if any, after rebuilding it."""
        with contextlib.suppress(Unusable):
            self._return(now=True)
            return self._db.problem()
        return None

    @property
    def database(self) -> Database:
        """The current database of the rows, for other data that may be lost with them (`remote.ledger`)."""
        return self._db

    def scrub(self) -> str | None:
        """Erase deleted rows, in the log too; return None, or the possible remains and the reason."""
        try:
            self._settle()
            return self._db.scrub()
        except StoreError as error:
            return str(error)

    def close(self) -> None:
        """Write the times at which rows and files agree, and close the database."""
        if self._closed:
            return
        with contextlib.suppress(StoreError, OSError):
            if self._behind:
                self._settle()
        self._closed = True
        with self._lock:
            if self._agreed != self._noted and self._db.path is not None:
                with contextlib.suppress(Unusable):
                    self._note()
            self._agreed, self._noted, self._loaded = {}, {}, None
        self._db.close()

    # -- inside --------------------------------------------------------------------------------

    def _change(self, keys: Sequence[str], change: Callable[[], None]) -> bool:
        try:
            if self._db.path is not None and time.monotonic() >= self._again:
                with self._db.writing():
                    change()
                with self._held:
                    self._behind.difference_update(keys)
                return True
        except Unusable as error:  # they are corrected from the files before the next listing
            logger.warning("the row of %s is written later: %s", ", ".join(keys), error)
            self._again = time.monotonic() + _RETRY_SECONDS
        with self._held:
            self._behind.update(keys)
        return False

    def _answer(self, question: Callable[[], Result], *, thorough: Known | None = None) -> Result:
        """The answer to ``question`` from a database that agrees with the files.

        ``thorough``: compare all folders, with the rows that it returns as known.
        """
        while True:
            db = self._db
            if self._closed:
                raise StoreError(f"store {self.path.parent} is closed: open it again")
            try:
                asked = self._follow(db, thorough)
                found = question()
                # else it was replaced meanwhile, and the answer is from rows that were not compared
                if self._db is db and asked == self._loaded == (db, db.generation):
                    return found
            except Emptied:
                continue
            except Unusable as error:
                if db.path is None:
                    raise
                self._leave(db, error)
            except WrongRows as error:
                logger.warning(
                    "%s: %d rows that were not written here are made anew", self.path, len(error.keys)
                )
                self._discard(error.keys)

    def _follow(self, db: Database, thorough: Known | None) -> tuple[Database, int] | None:
        """Bring the rows of ``db`` into agreement with the files; return the database and its generation."""
        if self._return() and self._db is not db:
            return None
        try:
            self._settle()
            shards = self._files.shards()
            with self._lock:
                loaded = self._load(db)
                names = (
                    sorted({*shards, *self._agreed, *self._listed(db)}) if thorough else self._agreed | shards
                )
                changed = [n for n in names if thorough or self._agreed.get(n) != shards.get(n)]
            for name in changed:
                with self._lock:
                    self._reconcile(name, shards.get(name), thorough or self._stamps)
        except OSError as error:
            raise StoreError(f"store {self.path.parent}: cannot list the objects: {error}") from error
        if len(changed) > _MANY and db.path is not None:
            self._note()
        return loaded

    def _load(self, db: Database) -> tuple[Database, int]:
        """Load the times written in ``db``; return the database and its generation."""
        while self._stale(db):
            listed = dict.fromkeys(self._listed(db), -1)  # their folders may be gone
            generation = db.generation
            noted = dict(db.execute("SELECT name, changed FROM shards"))
            if generation == db.generation:  # else it was emptied between the two reads
                with self._held:
                    self._noted, self._agreed = noted, listed | noted
                self._loaded = db, generation
        assert self._loaded is not None
        return self._loaded

    def _stale(self, db: Database) -> bool:
        return self._loaded != (db, db.generation)

    def _listed(self, db: Database) -> Iterator[str]:
        """The folders that have rows; no row is read for it."""
        behind = ""
        while rows := db.execute("SELECT key FROM objects WHERE key >= ? ORDER BY key LIMIT 1", (behind,)):
            name = str(rows[0][0])[:2]
            yield name
            behind = f"{name}g"

    def _reconcile(self, shard: str, changed: int | None, known: Known) -> None:
        """Correct one folder's rows from its files; ``known`` returns the rows taken as right."""
        there = {} if changed is None else self._files.stamps(shard)
        listed, differs = self._stamps(shard), compared(there, known(shard))
        fresh = {key: self._files.row(key) for key in differs.unlike}
        gone = [key for key in listed if key not in there or fresh.get(key, True) is None]
        if any(fresh.values()) or gone or differs.moved:
            with self._db.writing(_MEND_SECONDS):
                for key in differs.moved:
                    self._restamp(key, there[key])
                for found in fresh.values():
                    # unless replaced meanwhile: that writer's row follows
                    if found is not None and self._stamp_of(found[0].key) == found[1]:
                        self._db.execute(INSERT, self._codec.of(*found))
                for key in gone:
                    if self._stamp_of(key) == there.get(key):
                        self._delete(key)
        with self._held:
            if changed is None:
                self._agreed.pop(shard, None)
            elif time.time_ns() - changed > _SETTLED_NS:
                self._agreed[shard] = changed

    def _stamps(self, shard: str) -> dict[str, str]:
        """Key and stamp of the rows of one folder."""
        sql = "SELECT key, stamp FROM objects WHERE key >= ? AND key < ?"
        return dict(self._db.execute(sql, (shard, f"{shard}g")))

    def _known(self, shard: str) -> dict[str, str]:
        """The same, of rows written by this store only."""
        sql = f"SELECT {COLUMNS} FROM objects WHERE key >= ? AND key < ?"
        rows = self._db.execute(sql, (shard, f"{shard}g"))
        return {row[0]: row[12] for row in rows if self._codec.is_ours(row)}

    def _afresh(self, shard: str) -> dict[str, str]:
        """No row is taken as right."""
        return {}

    def _settle(self) -> None:
        """Correct the rows known to be behind."""
        with self._held:
            keys, self._behind = self._behind, set()
        if not keys:
            return
        try:
            with self._db.writing(_MEND_SECONDS):
                for key in keys:
                    stamp = self._files.stamp(key)
                    rows = self._db.execute("SELECT stamp FROM objects WHERE key = ?", (key,))
                    if stamp is not None and rows == [(stamp,)]:
                        continue
                    found = None if stamp is None else self._files.row(key)
                    if found is None:
                        self._delete(key)
                    else:
                        self._db.execute(INSERT, self._codec.of(*found))
        except BaseException:
            with self._held:
                self._behind |= keys
            raise

    def _note(self) -> None:
        """Write the times at which rows and files agree, for the next process that opens the database."""
        now = time.time_ns()
        with self._held:
            settled = {name: when for name, when in self._agreed.items() if 0 < when < now - _SETTLED_NS}
        changed = [(name, when) for name, when in settled.items() if self._noted.get(name) != when]
        with self._db.writing(_MEND_SECONDS):
            self._db.execute_many("INSERT OR REPLACE INTO shards VALUES (?, ?)", changed)
        self._noted.update(settled)

    def _return(self, *, now: bool = False) -> bool:
        """Return to the database at the path if it is writable again; return True if it is in use."""
        if self._db.path is not None:
            return True
        if self._read_only or (not now and time.monotonic() < self._again):
            return False
        db = Database(self.path, SCHEMA, TABLES)
        try:
            with db.writing(0.0):
                db.execute("INSERT OR REPLACE INTO shards VALUES ('', 0)")
                db.execute("DELETE FROM shards WHERE name = ''")
        except Unusable:
            db.close()
            self._again = time.monotonic() + _RETRY_SECONDS
            return False
        with self._lock:
            self._db.close()
            self._db = db
        return True

    def _leave(self, db: Database, error: Unusable) -> None:
        """Continue with a copy in memory."""
        with self._lock:
            if self._db is db:
                logger.warning("listing from the files for now: %s", error)
                self._db, self._again = self._copy(), time.monotonic() + _RETRY_SECONDS
                db.close()

    def _copy(self) -> Database:
        return Database.copy_of(self.path, SCHEMA, TABLES, immutable=self._read_only)

    def _discard(self, keys: list[Any]) -> None:
        with self._lock, self._db.writing(_MEND_SECONDS):
            for key in keys:
                self._db.execute("DELETE FROM objects WHERE key = ?", (key,))
                self._agreed.pop(str(key)[:2], None)

    def _delete(self, key: str) -> None:
        self._db.execute("DELETE FROM objects WHERE key = ?", (key,))
        self._db.execute("DELETE FROM uses WHERE key = ?", (key,))

    def _restamp(self, key: str, stamp: str) -> None:
        for row in self._db.execute(f"SELECT {COLUMNS} FROM objects WHERE key = ?", (key,)):
            self._db.execute(INSERT, self._codec.signed((*row[:12], stamp, *row[13:-1])))

    def _stamp_of(self, key: str) -> str | None:
        return self._files.stamp(key) if is_key(key) else None
