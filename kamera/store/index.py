"""The index of a directory: a row for each object, so that listing opens no object; and the objects' uses.

It only repeats the files' headers: it is a cache, and a look-up by key does not need it. A process compares
the names of rows and files once, when it first asks; a row that is listed is compared with its file's stamp.
So whatever became of it (lost, damaged, of another version, behind a writer who died), it is made right from
the files. Where the database cannot be used (it is locked, or the disk is full or read-only), the same rows
are made in memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import cattrs

from kamera import forks
from kamera.errors import KameraError, StoreError
from kamera.files import lock_path
from kamera.store.format import Codec
from kamera.store.keys import KINDS, Context, home_of, is_key
from kamera.store.records import ObjectInfo, canonical_json

if TYPE_CHECKING:
    from kamera.store.directory import Directory

logger = logging.getLogger(__name__)

USES = 256
"""Objects whose uses are counted in memory before they are written."""
PATIENCE = 2.0
"""Seconds to wait for another writer."""

SCHEMA = 13
_RETRY_SECONDS = 5.0  # after these an unusable database is tried again
_PAGE = 1000  # rows read at a time: other threads may run between two pages
_BATCH = 256  # rows made in one transaction
_CONVERTER = cattrs.Converter(detailed_validation=False)
_T = TypeVar("_T")

Stamped = tuple[ObjectInfo, str]
"""An object, and the stamp of the file it was read from."""


def selects(
    info: ObjectInfo, kind: str | None = None, chunk_id: str | None = None, context: Context | None = None
) -> bool:
    """True if an object is of this kind, chunk and context (None: any)."""
    return kind in (None, info.kind) and chunk_id in (None, info.chunk_id) and context in (None, info.context)


class Row(NamedTuple):
    """What is counted and searched by; ids are sealed as the codec says.

    ``home``: name of the object without which this one is of no use, or "". ``used``: the last use, or else
    when it was made (seconds since 1970). ``sent``: the stamp of the file that a remote confirmed.
    """

    key: str
    kind: str
    chunk_id: str
    fingerprint: str
    anchor: str
    tenant: str
    kv: str
    home: str
    bytes: int
    created: float
    used: float
    stamp: str = ""
    sent: str = ""

    @classmethod
    def of(cls, info: ObjectInfo, codec: Codec, stamp: str = "") -> Row:
        """The row of an object."""
        own, seal = info.context, codec.seal_id
        home = home_of(info.kind, own, info.chunk_id, info.base)
        home = codec.name(home) if home else ""
        return cls(
            key=info.key,
            kind=info.kind,
            chunk_id=seal(info.chunk_id),
            fingerprint=seal(own.fingerprint),
            anchor=seal(own.anchor),
            tenant=seal(own.tenant),
            kv=seal(own.kv),
            home=home,
            bytes=info.bytes,
            created=info.created,
            used=info.created,
            stamp=stamp,
        )


_COLUMNS = ", ".join(Row._fields)
_TABLES = f"""
CREATE TABLE objects ({_COLUMNS}, said, PRIMARY KEY (key)) WITHOUT ROWID;
CREATE INDEX by_chunk ON objects (chunk_id, tenant, created, key);
CREATE INDEX by_age ON objects (tenant, created, key);
CREATE INDEX by_kind ON objects (tenant, kind, bytes);
CREATE INDEX by_context ON objects (kind, anchor, fingerprint, tenant, kv) WHERE kind = 'canonical';
"""
_INSERT = f"INSERT OR REPLACE INTO objects VALUES ({', '.join('?' * (len(Row._fields) + 1))})"


class Index:
    """The rows of a directory's objects, of all its tenants. Safe to use from several threads and processes.

    ``files`` is asked for names, stamps and headers. A method raises its errors, and `StoreError` once it is
    closed, but none of the database.
    """

    def __init__(self, path: Path, files: Directory, codec: Codec, *, read_only: bool = False) -> None:
        self.path = path
        self._files = files
        self._codec = codec
        self._read_only = read_only
        self._db: Any = None  # the connection in use
        self._opened = 0  # connections so far
        self._file: tuple[int, int] | None = None  # its file; None: it is in memory
        self._agrees = False  # its rows were compared with the files' names
        self._doubts = 0
        self._is_behind = False  # this process has changed files whose rows may be missing
        self._again = float("inf") if read_only else 0.0  # time at which the file is tried again
        self.uses: dict[str, float] = {}
        """Uses of objects that are to be written, in seconds since 1970."""
        self.counting = threading.Lock()
        """Guards them, and not the rows: a look-up waits for none."""
        self._lock = threading.RLock()
        self._is_closed = False

    # -- changes -------------------------------------------------------------------------------

    def put(self, rows: Sequence[Stamped]) -> None:
        """Write the rows of objects whose files are in place, and on the disk."""
        self._run(lambda db: self._write(db, rows), agree=self._is_behind)

    def drop(self, key: str) -> None:
        """Delete the row of ``key``, if present."""
        self._run(lambda db: db.execute("DELETE FROM objects WHERE key = ?", (key,)), agree=False)

    def doubt(self) -> None:
        """Have names of rows and files compared again before the next query: a change was interrupted."""
        with self._lock:
            self._doubts += 1
            self._agrees, self._is_behind = False, True

    def correct(self, keys: Iterable[str]) -> None:
        """Make the rows of ``keys`` anew from their files, some at a time."""
        names = sorted(map(str, keys))
        for start in range(0, len(names), _BATCH):
            made = {name: self._files.peek(name) if is_key(name) else None for name in names[start:][:_BATCH]}
            gone = [name for name, row in made.items() if row is None]
            rows = [row for row in made.values() if row is not None]
            self._run(partial(self._write, rows=rows, gone=gone), agree=False)

    def write_uses(self) -> None:
        """Write the uses since the last time; a crash loses a few."""
        with self.counting:
            uses, self.uses = self.uses, {}
        if uses and not self._read_only:
            rows = [(when, key) for key, when in uses.items()]
            self._run(lambda db: _change(db, "UPDATE objects SET used = ? WHERE key = ?", rows), agree=False)

    def note_sent(self, key: str, stamp: str) -> None:
        """Note that the remote has the file of ``stamp``."""
        values = stamp, key, stamp
        self._run(lambda db: db.execute("UPDATE objects SET sent = ? WHERE key = ? AND stamp = ?", values))

    def rebuild(self) -> int:
        """Make all rows anew from the files' headers; return the number of rows."""
        self.correct({*self._files.names(), *self.keys()})
        return int(self._ask("SELECT COUNT(*) FROM objects")[0][0])

    def erase_deleted(self) -> str | None:
        """Rewrite it, since SQLite leaves copies of moved rows; None, or a line on what may remain."""

        def erase(db: Any) -> str | None:
            db.execute("PRAGMA temp_store = MEMORY")  # its intermediate copy is not a file
            db.execute("VACUUM")
            # the rows are in the log now: only the checkpoint's result tells if they reached the file
            [busy, _, _] = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            return "somebody reads it" if busy else None

        why = self._run(erase)
        if self._file is None and self.path.exists():
            why = "it cannot be used now"
        name = self.path.name
        notice = f"deleted rows may still be in {name} and {name}-wal ({why}): end that, and run it again"
        return notice if why else None

    def close(self) -> None:
        """Write all pending data, and close the database; any later use raises `StoreError`."""
        if not self._is_closed:
            with contextlib.suppress(StoreError, OSError):
                self.write_uses()
                if self._is_behind and not self._read_only:
                    self._again = 0.0
                    self._run(lambda db: None)
            with self._lock:
                self._disconnect()
                self._is_closed = True

    # -- queries -------------------------------------------------------------------------------

    def get(self, key: str) -> Stamped | None:
        """The row of ``key``, not compared with its file; None if absent or unreadable."""
        sql = "SELECT stamp, said FROM objects WHERE key = ?"
        rows = self._run(lambda db: db.execute(sql, (key,)).fetchall(), agree=False)
        info = self._read(rows[0][1], key) if rows else None
        return None if info is None else (info, rows[0][0])

    def keys(self) -> set[str]:
        """The keys of all rows, not compared with the files."""
        return self._run(_keys, agree=False)

    def iterate(
        self,
        tenant: str,
        kind: str | None = None,
        chunk_id: str | None = None,
        context: Context | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> Iterator[ObjectInfo]:
        """Objects of a tenant, oldest first, read in pages; the arguments are those of `ChunkStore.ls`."""
        wanted = {} if context is None else self._columns_of(context)
        wanted["tenant"] = self._codec.seal_id(tenant)
        wanted |= {} if chunk_id is None else {"chunk_id": self._codec.seal_id(chunk_id)}
        wanted |= {} if kind is None else {"kind": kind}
        where = " AND ".join(f"{name} = ?" for name in wanted)
        last: tuple[Any, ...] = ()
        left = float("inf") if limit is None else limit
        while left > 0:
            count = int(min(_PAGE, left))
            page = "AND (created, key) > (?, ?)" if last else ""
            sql = (
                f"SELECT created, key, stamp, said FROM objects WHERE {where} {page} "
                "ORDER BY created, key LIMIT ? OFFSET ?"
            )
            rows = self._ask(sql, (*wanted.values(), *last, count, 0 if last else offset))
            for _, key, stamp, said in rows:
                info = self._current(key, stamp, said)
                if info is not None and selects(info, kind, chunk_id, context):
                    left -= 1
                    yield info
            if len(rows) < count:
                return
            last = rows[-1][:2]

    def canonicals(self, context: Context) -> list[str]:
        """Names of the canonicals of a context, in no order; no row is read for it."""
        wanted = self._columns_of(context)
        where = " AND ".join(f"{name} = ?" for name in wanted)
        sql = f"SELECT key FROM objects WHERE kind = 'canonical' AND {where}"
        return [key for (key,) in self._ask(sql, tuple(wanted.values()))]

    def version(self) -> tuple[int, int, int]:
        """Numbers of which one changes whenever a row does, by whatever process."""
        others = "PRAGMA data_version"  # changes when another connection has changed the file
        return self._run(lambda db: (self._opened, int(db.execute(others).fetchone()[0]), db.total_changes))

    def kinds(self, tenant: str) -> dict[str, tuple[int, int]]:
        """Number and bytes of a tenant's objects of each kind; no row is read for it."""
        sql = "SELECT kind, COUNT(*), SUM(bytes) FROM objects WHERE tenant = ? GROUP BY kind"
        counts = {kind: (count, size) for kind, count, size in self._ask(sql, (self._codec.seal_id(tenant),))}
        return {kind: counts.get(kind, (0, 0)) for kind in KINDS}

    def bytes(self) -> int:
        """The bytes of all objects, of all tenants."""
        return int(self._ask("SELECT COALESCE(SUM(bytes), 0) FROM objects")[0][0])

    def rows(self, tenant: str | None = None) -> Iterator[Row]:
        """All objects of a tenant (None: of all tenants), in no order; ids stay sealed."""
        self.write_uses()
        # the plus keeps SQLite on the primary key: by tenant it would sort the whole store for every page
        only = "" if tenant is None else "AND +tenant = ?"
        mine = () if tenant is None else (self._codec.seal_id(tenant),)
        sql, after = f"SELECT {_COLUMNS} FROM objects WHERE key > ? {only} ORDER BY key LIMIT {_PAGE}", ""
        while rows := self._ask(sql, (after, *mine)):
            yield from map(Row._make, rows)
            after = rows[-1][0]

    # -- inside --------------------------------------------------------------------------------

    def _ask(self, sql: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows of a statement, from a database that agrees with the files."""
        rows: list[Any] = self._run(lambda db: db.execute(sql, values).fetchall())
        return rows

    def _run(self, work: Callable[[Any], _T], *, agree: bool = True) -> _T:
        """What ``work`` makes of the connection, and again if the database fails under it."""
        while True:
            agreed = self._make_agree() if agree and not self._agrees else self._db
            with self._lock, forks.hold_off_forks():
                if self._is_closed:
                    raise StoreError(f"store {self.path.parent} is closed: open it again")
                try:
                    db = self._connected()
                    if not agree or db is agreed:  # else it was replaced meanwhile
                        return work(db)
                except sqlite3.DatabaseError as error:
                    if self._again > time.monotonic():  # in memory
                        raise StoreError(
                            f"the index of {self.path.parent} cannot be kept: {error}"
                        ) from error
                    if _is_damage(error):
                        self._remove(error)
                    else:
                        logger.warning("%s cannot be used now, rows are made in memory: %s", self.path, error)
                        self._disconnect()
                        self._again, self._is_behind = time.monotonic() + _RETRY_SECONDS, True

    def _connected(self) -> Any:
        """The connection to the file that is at the path now, or for a while to one in memory."""
        if time.monotonic() < self._again:
            if self._db is None or self._file is not None:
                self._disconnect()
                self._db, self._opened = _make(":memory:"), self._opened + 1
            self._agrees = False  # what other processes write is not in it
        else:
            try:
                if self._db is None or self._file is None or _identity(self.path) != self._file:
                    self._connect()
            except OSError as error:
                raise sqlite3.OperationalError(str(error)) from error
        return self._db

    def _connect(self) -> None:
        self._disconnect()
        with lock_path(self.path.parent, PATIENCE):
            if self.path.is_symlink():
                raise OSError(f"{self.path} is a link, and a store follows no links: remove it")
            with contextlib.suppress(FileExistsError):  # SQLite would make it readable by everyone
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            self._file = _identity(self.path)
            self._db, self._opened = _make(self.path), self._opened + 1

    def _disconnect(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._db = self._file = None
        self._agrees = False

    def _remove(self, error: Exception) -> None:
        """Remove the damaged file in use, unless another is in its place by now: an empty one follows."""
        try:
            with lock_path(self.path.parent, PATIENCE):
                if self._file == _identity(self.path):
                    logger.warning("%s is unreadable (%s): starting over", self.path, error)
                    # before it is closed: then SQLite leaves the new file's log alone
                    for suffix in ("", "-wal", "-shm"):
                        Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        except OSError as refusal:
            logger.warning("%s cannot be removed, rows are made in memory: %s", self.path, refusal)
            self._again = time.monotonic() + _RETRY_SECONDS
        self._disconnect()

    def _make_agree(self) -> Any:
        """Make the rows of files that have none, remove those of no file; return the connection."""
        doubts, names = self._doubts, set(self._files.names())
        db, keys = self._run(lambda db: (db, _keys(db)), agree=False)
        self.correct(names ^ keys)
        with self._lock:
            self._agrees = db is self._db and doubts == self._doubts
            self._is_behind &= not (self._agrees and self._file)
        return db

    def _write(self, db: Any, rows: Sequence[Stamped], gone: Sequence[str] = ()) -> None:
        """Write rows, unless their files were replaced meanwhile: then that writer's follow."""
        db.execute("BEGIN IMMEDIATE")
        try:
            new = [(info, stamp) for info, stamp in rows if self._files.stamp(info.key) == stamp]
            if gone:
                db.executemany("DELETE FROM objects WHERE key = ?", [(key,) for key in gone])
            if new:
                # a row that is made anew keeps the uses and what is known of the remote
                held = {}
                for info, _ in new:
                    sql = "SELECT used, sent FROM objects WHERE key = ?"
                    held[info.key] = db.execute(sql, (info.key,)).fetchone()
                db.executemany(_INSERT, [self._row_of(*row, held[row[0].key]) for row in new])
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # some errors have rolled back already
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
            raise

    def _row_of(self, info: ObjectInfo, stamp: str, held: tuple[Any, Any] | None) -> tuple[Any, ...]:
        row = Row.of(info, self._codec, stamp)
        if held is not None:
            used = held[0] if isinstance(held[0], float) else row.used
            row = row._replace(used=max(used, row.used), sent=held[1])
        return (*row, self._codec.seal_id(canonical_json(_CONVERTER.unstructure(info))))

    def _read(self, said: str, key: str) -> ObjectInfo | None:
        """What a row says; None for one that was not written here."""
        try:
            info = _CONVERTER.structure(json.loads(self._codec.open_id(said)), ObjectInfo)
        except (KameraError, AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return None
        return info if info.key == key else None

    def _current(self, key: str, stamp: str, said: str) -> ObjectInfo | None:
        """The object of a row; one that is not of its file is read from that, and the row made anew."""
        if not is_key(key):  # it may be damaged
            return None
        info, now = self._read(said, key), self._files.stamp(key)
        if info is not None and now == stamp:
            return info
        self.correct([key])
        row = None if now is None else self._files.peek(key)
        return None if row is None else row[0]

    def _columns_of(self, context: Context) -> dict[str, str]:
        """The columns of a context as they are searched; there is none for its origin."""
        ids = {name: text for name, text in vars(context).items() if name != "origin"}
        return {name: self._codec.seal_id(text) for name, text in ids.items()}


def _keys(db: Any) -> set[str]:
    return {str(key) for (key,) in db.execute("SELECT key FROM objects").fetchall()}


def _change(db: Any, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Run a statement for each of ``rows``, in one transaction."""
    db.execute("BEGIN IMMEDIATE")
    try:
        db.executemany(sql, rows)
    finally:
        if db.in_transaction:
            db.execute("COMMIT")


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
            db.executescript(f"BEGIN IMMEDIATE;{_TABLES};PRAGMA user_version = {SCHEMA};COMMIT")
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
