"""The index: one row per object, so that listing never opens the objects.

It only repeats what the files say, and counts how objects are used. It is a cache: a look-up by key needs
none of it, and before anything is listed the folders' times are compared with those for which rows and
files are known to agree. A folder that has changed is compared name by name. Where the database cannot be
used, as it is locked, or the disk is full or read-only, the same rows are made in memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from kamera.errors import KameraError, StoreError
from kamera.store.disk.database import Database, Emptied, Unusable
from kamera.store.info import Census, KindCount, ObjectInfo
from kamera.store.keys import KINDS, Context, is_key

logger = logging.getLogger(__name__)

HALF_LIFE = 7 * 86_400.0
"""After how many seconds a use counts half."""

_SCHEMA = 3
_TABLES = """
CREATE TABLE IF NOT EXISTS objects (
    key TEXT PRIMARY KEY, kind TEXT NOT NULL, chunk_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL, anchor TEXT NOT NULL, tenant TEXT NOT NULL,
    antecedents TEXT NOT NULL, tokens INTEGER NOT NULL, rank INTEGER, formed TEXT,
    bytes INTEGER NOT NULL, created REAL NOT NULL, stamp TEXT NOT NULL, kv TEXT NOT NULL, mac TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uses (
    key TEXT PRIMARY KEY, uses REAL NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS shards (name TEXT PRIMARY KEY, changed INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sent (name TEXT PRIMARY KEY, stamp TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_chunk ON objects (chunk_id, tenant, created, key);
CREATE INDEX IF NOT EXISTS by_age ON objects (tenant, created, key);
CREATE INDEX IF NOT EXISTS by_kind ON objects (tenant, kind, bytes);
"""
_PAGE = 1000  # rows read at a time: other threads get their turn between two pages
_USES_HELD = 256  # objects whose uses are counted in memory before they are written
_BEHIND = 512  # objects whose rows may wait to be set right before that is done
_MEND_SECONDS = 1.0  # for which whoever lists waits for a writer, where rows are to be mended
_RETRY_SECONDS = 5.0  # after which a database that could not be used is tried again
_SETTLED_NS = 100_000_000  # a folder that changed less long ago may change again at the same time of its own

Stamped = tuple[ObjectInfo, str]
"""A row: the object, and the stamp of the file it was read from."""
Result = TypeVar("Result")


class Weighed(NamedTuple):
    """What `gc` must know of an object: ``uses`` decayed to the time ``used`` (0 and None: never)."""

    key: str
    kind: str
    chunk_id: str
    fingerprint: str
    anchor: str
    tenant: str
    tokens: int
    bytes: int
    created: float
    stamp: str
    uses: float
    used: float | None
    kv: str = "as-is"


class Files(Protocol):
    """The files that the rows repeat. Raises `OSError` or `StoreError`."""

    def shards(self) -> dict[str, int]:
        """The folders of files, by what their names' keys begin with, and when each changed (ns)."""
        ...

    def stamps(self, shard: str) -> dict[str, str]:
        """Key and stamp of every file in one of them."""
        ...

    def stamp(self, key: str) -> str | None:
        """Stamp of one file; None if there is none."""
        ...

    def row(self, key: str) -> Stamped | None:
        """What the file's header says; None if there is none, or none that can be read."""
        ...


class _Wrong(Exception):
    """Rows (by key) that are none that were written here."""

    def __init__(self, keys: list[Any]) -> None:
        super().__init__(keys)
        self.keys = keys


class Index:
    """Rows of objects in SQLite. Safe to use from several threads and processes.

    ``path`` None: in memory only. ``veil`` and ``unveil`` turn ids into what stands in the file for them,
    and back; ``sign`` makes the digest of a row, keyed where its store is sealed (see `Codec`). A listing
    raises what ``files`` raises, and never for the database's sake.
    """

    def __init__(
        self,
        path: Path,
        files: Files,
        veil: Callable[[str], str] = str,
        unveil: Callable[[str], str] = str,
        sign: Callable[[str], str] = str,
        clock: Callable[[], float] = time.time,
        read_only: bool = False,
    ) -> None:
        self.path = path
        self._files = files
        self._veil = veil
        self._unveil = unveil
        self._sign = sign
        self._clock = clock
        self._read_only = read_only
        self._uses: dict[str, tuple[int, float]] = {}
        self._behind: set[str] = set()
        self._held = threading.Lock()  # of the two above
        self._lock = threading.RLock()  # of who compares rows and files
        self._agreed: dict[str, int] = {}  # shards as of which change all their rows were right
        self._noted: dict[str, int] = {}  # the same as it stands in the database
        self._loaded: tuple[Database, int] | None = None  # whose and of which generation these are
        self._db = Database(path, _SCHEMA, _TABLES)
        self._closed = False
        self._again = 0.0  # when a database that could not be used is tried again
        if read_only:
            self._db = self._copy()

    # -- rows follow files ---------------------------------------------------------------------

    def put(self, info: ObjectInfo, stamp: str) -> bool:
        """Write the row of an object whose file is in place; whether it is in the database.

        If not it is made up for before the next listing, by whoever lists.
        """

        def put() -> None:
            self._db.execute(_INSERT, self._row(info, stamp))

        return self._change(info.key, put)

    def drop(self, key: str) -> bool:
        """Delete the row of ``key``, if there is one; otherwise as `put`."""

        def drop() -> None:
            self._db.execute("DELETE FROM objects WHERE key = ?", (key,))
            self._db.execute("DELETE FROM uses WHERE key = ?", (key,))

        return self._change(key, drop)

    def later(self, key: str) -> None:
        """The file of ``key`` has changed: its row is set right with others, before the next listing."""
        with self._held:
            self._behind.add(key)
            due = len(self._behind) >= _BEHIND
        if due:
            with contextlib.suppress(Unusable):
                self._settle()

    def settle(self, key: str) -> bool:
        """Make the row of ``key`` say what its file says; whether that could be done now."""
        self.later(key)
        with contextlib.suppress(Unusable):
            self._settle()
        return key not in self._behind

    def moved(self, shard: str, before: int, after: int) -> None:
        """A folder changed from ``before`` to ``after`` (ns) by what the rows, or `later`, know of."""
        with self._lock:
            if self._agreed.get(shard) == before:
                self._agreed[shard] = after

    def correct(self, info: ObjectInfo, stamp: str) -> bool:
        """Have the row that the verified file of ``stamp`` gives; whether there was another."""
        row = self.get(info.key)
        if row == (info, stamp) or self._files.stamp(info.key) != stamp:
            return False
        self.put(info, stamp)
        return row is not None

    def rebuild(self) -> int:
        """Make all rows anew from the files' headers, folder by folder; how many there are.

        What is known of the uses of objects that are still there stays, and nobody waits for this.
        """
        with contextlib.suppress(Unusable):
            self._return(now=True)
        self._answer(lambda: None, thorough=self._afresh)
        return int(self._answer(lambda: self._db.execute("SELECT COUNT(*) FROM objects"))[0][0])

    def compare(self) -> None:
        """Hold every row against its file's stamp and its own digest, whatever the folders' times say."""
        self._answer(lambda: None, thorough=self._known)

    def check(self) -> str | None:
        """Read the whole database; what is wrong with it is told, and it is made anew."""
        with contextlib.suppress(Unusable):
            self._return(now=True)
            return self._db.problem()
        return None

    # -- questions -----------------------------------------------------------------------------

    def get(self, key: str) -> Stamped | None:
        """The row of ``key`` as it is; None, too, where it cannot be read."""
        try:
            rows = self._select("WHERE key = ?", (key,))
        except (Unusable, _Wrong):
            return None
        return rows[0] if rows else None

    def keys(self) -> set[str]:
        """The keys of all rows, as they are."""
        with contextlib.suppress(Unusable):
            return {key for (key,) in self._db.execute("SELECT key FROM objects")}
        return set()

    def iterate(
        self,
        *,
        tenant: str,
        kind: str | None = None,
        chunk_id: str | None = None,
        context: Context | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> Iterator[ObjectInfo]:
        """Objects of a tenant, oldest first, a page at a time: ``limit`` of them behind ``offset``."""
        ids = {"tenant": tenant, "chunk_id": chunk_id, **({} if context is None else vars(context))}
        wanted = {name: self._veil(value) for name, value in ids.items() if value is not None}
        wanted.update({} if kind is None else {"kind": kind})
        where = "WHERE " + " AND ".join(f"{name} = ?" for name in wanted)
        values: tuple[Any, ...] = tuple(wanted.values())
        page, behind = where, values
        self._answer(lambda: None)
        while limit is None or limit > 0:
            count = _PAGE if limit is None else min(_PAGE, limit)
            rows = self._page(f"{page} ORDER BY created, key LIMIT ? OFFSET ?", (*behind, count, offset))
            yield from (info for info, _ in rows)
            if len(rows) < count:
                return
            last, offset = rows[-1][0], 0
            limit = None if limit is None else limit - count
            page, behind = f"{where} AND (created, key) > (?, ?)", (*values, last.created, last.key)

    def rows(
        self,
        *,
        tenant: str,
        kind: str | None = None,
        chunk_id: str | None = None,
        context: Context | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[ObjectInfo]:
        """`iterate`, all at once."""
        found = self.iterate(
            tenant=tenant, kind=kind, chunk_id=chunk_id, context=context, limit=limit, offset=offset
        )
        return list(found)

    def kinds(self, tenant: str) -> dict[str, KindCount]:
        """How many objects of each kind a tenant has, and their bytes; no row is read for it."""
        sql = "SELECT kind, COUNT(*), SUM(bytes) FROM objects WHERE tenant = ? GROUP BY kind"
        found = {
            kind: KindCount(count, total)
            for kind, count, total in self._answer(lambda: self._db.execute(sql, (self._veil(tenant),)))
        }
        return {kind: found.get(kind, KindCount(0, 0)) for kind in KINDS}

    def census(self, tenant: str, kind: str | None = None) -> Census:
        """`kinds`, and how many chunks and contexts these objects are of."""
        kinds = {name: held for name, held in self.kinds(tenant).items() if kind in (None, name)}
        where = "tenant = ?" if kind is None else "tenant = ? AND kind = ?"
        values = (self._veil(tenant),) if kind is None else (self._veil(tenant), kind)
        chunks = f"SELECT COUNT(DISTINCT chunk_id) FROM objects WHERE {where}"
        contexts = (
            f"SELECT COUNT(*) FROM (SELECT DISTINCT fingerprint, anchor, kv FROM objects WHERE {where})"
        )
        by_form = f"SELECT kv, COUNT(*), SUM(bytes) FROM objects WHERE {where} GROUP BY kv"
        held, of, forms = self._answer(
            lambda: [self._db.execute(sql, values) for sql in (chunks, contexts, by_form)]
        )
        found = sorted((self._unveil(kv), KindCount(*count)) for kv, *count in forms)
        return Census(kinds, held[0][0], of[0][0], dict(found))

    def bytes(self) -> int:
        """The bytes of all objects, whoever's."""
        sql = "SELECT COALESCE(SUM(bytes), 0) FROM objects"
        return int(self._answer(lambda: self._db.execute(sql))[0][0])

    def of_chunk(self, chunk_id: str, tenant: str) -> list[ObjectInfo]:
        """What was made of a chunk: its objects, and patches of others formed behind it."""
        veiled = self._veil(chunk_id)
        where = "WHERE tenant = ? AND (chunk_id = ? OR instr(antecedents, ?) > 0) ORDER BY created, key"
        rows = self._page(where, (self._veil(tenant), veiled, json.dumps(veiled)), follow=True)
        found = [info for info, _ in rows]
        return [info for info in found if chunk_id in (info.chunk_id, *info.antecedents)]

    def contexts(self, tenant: str) -> list[Context]:
        """The contexts of a tenant's objects."""
        sql = "SELECT DISTINCT fingerprint, anchor, tenant, kv FROM objects WHERE tenant = ?"
        rows = self._answer(lambda: self._db.execute(sql, (self._veil(tenant),)))
        return [Context(*map(self._unveil, row)) for row in rows]

    def last_use(self, key: str) -> float | None:
        """When ``key`` was used last (seconds since 1970), as far as is known here."""
        with self._held:
            if key in self._uses:
                return self._uses[key][1]
        with contextlib.suppress(Unusable):
            for (used,) in self._db.execute("SELECT used FROM uses WHERE key = ?", (key,)):
                return float(used)
        return None

    def weighed(self, tenant: str | None = None) -> Iterator[Weighed]:
        """All objects of a tenant (None: of everyone) with their uses, in no order; ids stay veiled."""
        self.flush_uses()
        # the plus keeps SQLite on the primary key: by tenant it would sort the whole store for every page
        after, only = "", "" if tenant is None else "AND +tenant = ?"
        sql = (
            "SELECT key, kind, chunk_id, fingerprint, anchor, tenant, tokens, bytes, created, stamp, "
            f"COALESCE(uses, 0), used, kv FROM objects LEFT JOIN uses USING (key) WHERE key > ? {only} "
            f"ORDER BY key LIMIT {_PAGE}"
        )
        self._answer(lambda: None)
        mine = () if tenant is None else (self._veil(tenant),)

        def page() -> list[Any]:
            return self._db.execute(sql, (after, *mine))

        while rows := self._answer(page, follow=False):
            yield from (Weighed(*row) for row in rows)
            after = rows[-1][0]

    def unused_since(self, when: float) -> list[str]:
        """Objects that were neither made nor used after ``when`` (seconds since 1970), whoever's."""
        self.flush_uses()
        sql = "SELECT key FROM objects LEFT JOIN uses USING (key) WHERE COALESCE(used, created) < ?"
        return [key for (key,) in self._answer(lambda: self._db.execute(sql, (when,)))]

    def used(self, key: str) -> None:
        """Count a use of ``key``. Kept in memory and written now and then: a crash forgets a few."""
        with self._held:
            count, _ = self._uses.get(key, (0, 0.0))
            self._uses[key] = count + 1, self._clock()
            due = len(self._uses) >= _USES_HELD
        if due:
            self.flush_uses()

    def flush_uses(self) -> None:
        """Write the uses counted so far; where another process holds the database they are dropped."""
        with self._held:
            taken, self._uses = self._uses, {}
        names = list(taken)
        try:
            for i in range(0, len(names), _USES_HELD):
                self._add_uses({name: taken[name] for name in names[i : i + _USES_HELD]})
        except Unusable as error:
            logger.debug("uses not counted: %s", error)

    @property
    def database(self) -> Database:
        """What the rows are in now, for those who keep what may be lost with them (`remote.ledger`)."""
        return self._db

    def scrub(self) -> str | None:
        """Leave no trace of deleted rows, the log included; None, or what may be left, and why."""
        try:
            self._settle()
            return self._db.scrub()
        except StoreError as error:
            return str(error)

    def close(self) -> None:
        """Note what is known to agree, and close the database."""
        if self._closed:
            return
        with contextlib.suppress(StoreError, OSError):
            if self._behind:
                self._settle()
        self.flush_uses()
        self._closed = True
        with self._lock:
            if self._agreed != self._noted and self._db.path is not None:
                with contextlib.suppress(Unusable):
                    self._note()
            self._agreed, self._noted, self._loaded = {}, {}, None
        self._db.close()

    # -- inside --------------------------------------------------------------------------------

    def _change(self, key: str, change: Callable[[], None]) -> bool:
        try:
            if self._db.path is not None and time.monotonic() >= self._again:
                with self._db.writing():
                    change()
                with self._held:
                    self._behind.discard(key)
                return True
        except Unusable as error:  # before the next listing it is set right, from the file
            logger.warning("the row of %s is written later: %s", key, error)
            self._again = time.monotonic() + _RETRY_SECONDS
        with self._held:
            self._behind.add(key)
        return False

    def _answer(
        self,
        question: Callable[[], Result],
        *,
        follow: bool = True,
        thorough: Callable[[str], dict[str, str]] | None = None,
    ) -> Result:
        """``question`` of a database that agrees with the files; ``follow`` False: only if it is a new one.

        ``thorough``: compare all folders, with what that says of their rows.
        """
        while True:
            db = self._db
            if self._closed:
                raise StoreError(f"store {self.path.parent} is closed: open it again")
            try:
                with self._lock:
                    if follow or self._loaded != (db, db.generation):
                        self._follow(thorough)
                follow, loaded = False, self._loaded
                found = question()
                if loaded == (self._db, self._db.generation):
                    return found
            except Emptied:
                continue
            except Unusable as error:
                if db.path is None:
                    raise
                self._leave(db, error)
            except _Wrong as error:
                logger.warning(
                    "%d rows of %s are made anew: none that were written here", len(error.keys), self.path
                )
                self._discard(error.keys)
                follow = True

    def _follow(self, thorough: Callable[[str], dict[str, str]] | None) -> None:
        """Bring the rows into agreement with the files."""
        with contextlib.suppress(Unusable):
            self._return()
        try:
            self._settle()
            self._compare(self._files.shards(), thorough)
        except OSError as error:
            raise StoreError(f"store {self.path.parent}: cannot list the objects: {error}") from error

    def _compare(self, shards: dict[str, int], thorough: Callable[[str], dict[str, str]] | None) -> None:
        db = self._db
        if thorough is None and self._loaded == (db, db.generation):
            changed = [
                name for name in {**shards, **self._agreed} if self._agreed.get(name) != shards.get(name)
            ]
        else:
            listed = set(self._listed(db))
            self._noted = dict(db.execute("SELECT name, changed FROM shards"))
            self._agreed = {} if thorough else dict(self._noted)
            self._loaded = db, db.generation
            changed = [n for n in {**shards, **dict.fromkeys(listed)} if self._agreed.get(n) != shards.get(n)]
            changed = sorted({*shards, *listed}) if thorough else changed
        for name in changed:
            self._reconcile(name, shards.get(name), thorough or self._stamps)
        if len(changed) > 16 and db.path is not None:
            self._note()

    def _listed(self, db: Database) -> Iterator[str]:
        """The folders of which there are rows; their rows are not read for it."""
        behind = ""
        while rows := db.execute("SELECT key FROM objects WHERE key >= ? ORDER BY key LIMIT 1", (behind,)):
            name = str(rows[0][0])[:2]
            yield name
            behind = f"{name}g"

    def _reconcile(self, shard: str, changed: int | None, known: Callable[[str], dict[str, str]]) -> None:
        """Have the rows of one folder that its files give; right ones are those that ``known`` tells."""
        there = {} if changed is None else self._files.stamps(shard)
        listed, right = self._stamps(shard), known(shard)
        fresh: dict[str, Stamped | None] = {}
        moved = {}
        for key, stamp in there.items():
            row = right.get(key)
            if row is not None and row != stamp and _times(row) == _times(stamp):
                moved[key] = stamp  # copied with its time, as a restored backup is
            elif row != stamp:
                fresh[key] = self._files.row(key)
        gone = [key for key in listed if key not in there or fresh.get(key, True) is None]
        if any(fresh.values()) or gone or moved:
            with self._db.writing(_MEND_SECONDS):
                for key, stamp in moved.items():
                    self._restamp(key, stamp)
                for found in fresh.values():
                    # unless it was replaced meanwhile: that writer's row follows
                    if found is not None and self._stamp_of(found[0].key) == found[1]:
                        self._db.execute(_INSERT, self._row(*found))
                for key in gone:
                    if self._stamp_of(key) == there.get(key):
                        self._delete(key)
        if changed is None:
            self._agreed.pop(shard, None)
        elif time.time_ns() - changed > _SETTLED_NS:
            self._agreed[shard] = changed

    def _stamps(self, shard: str) -> dict[str, str]:
        """Key and stamp of the rows of one folder."""
        sql = "SELECT key, stamp FROM objects WHERE key >= ? AND key < ?"
        return dict(self._db.execute(sql, (shard, f"{shard}g")))

    def _known(self, shard: str) -> dict[str, str]:
        """The same of those rows that were written here."""
        sql = f"SELECT {_COLUMNS} FROM objects WHERE key >= ? AND key < ?"
        rows = self._db.execute(sql, (shard, f"{shard}g"))
        return {row[0]: row[12] for row in rows if self._digest(row[:-1]) == row[-1]}

    def _afresh(self, shard: str) -> dict[str, str]:
        """Trust none."""
        return {}

    def _settle(self) -> None:
        """Set right the rows that are known to be behind."""
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
                        self._db.execute(_INSERT, self._row(*found))
        except BaseException:
            with self._held:
                self._behind |= keys
            raise

    def _note(self) -> None:
        """Write down as of which changes rows and files agree, for whoever opens the database next."""
        now = time.time_ns()
        settled = {name: when for name, when in self._agreed.items() if now - when > _SETTLED_NS}
        changed = [(name, when) for name, when in settled.items() if self._noted.get(name) != when]
        with self._db.writing(_MEND_SECONDS):
            self._db.execute_many("INSERT OR REPLACE INTO shards VALUES (?, ?)", changed)
        self._noted.update(settled)

    def _return(self, *, now: bool = False) -> bool:
        """Go back to the database at the path, if it can be written to again; whether that is in use."""
        if self._db.path is not None:
            return True
        if self._read_only or (not now and time.monotonic() < self._again):
            return False
        db = Database(self.path, _SCHEMA, _TABLES)
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
        """Go on with a copy in memory."""
        with self._lock:
            if self._db is db:
                logger.warning("listing from the files for now: %s", error)
                self._db, self._again = self._copy(), time.monotonic() + _RETRY_SECONDS
                db.close()

    def _copy(self) -> Database:
        return Database.copy_of(self.path, _SCHEMA, _TABLES, immutable=self._read_only)

    def _discard(self, keys: list[Any]) -> None:
        with self._lock, self._db.writing(_MEND_SECONDS):
            for key in keys:
                self._db.execute("DELETE FROM objects WHERE key = ?", (key,))
                self._agreed.pop(str(key)[:2], None)

    def _delete(self, key: str) -> None:
        self._db.execute("DELETE FROM objects WHERE key = ?", (key,))
        self._db.execute("DELETE FROM uses WHERE key = ?", (key,))

    def _restamp(self, key: str, stamp: str) -> None:
        for row in self._db.execute(f"SELECT {_COLUMNS} FROM objects WHERE key = ?", (key,)):
            anew = (*row[:12], stamp, row[13])
            self._db.execute(_INSERT, (*anew, self._digest(anew)))

    def _stamp_of(self, key: str) -> str | None:
        return self._files.stamp(key) if is_key(key) else None

    def _page(self, rest: str, values: tuple[Any, ...], *, follow: bool = False) -> list[Stamped]:
        return self._answer(lambda: self._select(rest, values), follow=follow)

    def _add_uses(self, taken: dict[str, tuple[int, float]]) -> None:
        held = (
            "SELECT key, uses, used FROM objects LEFT JOIN uses USING (key) "
            f"WHERE key IN ({', '.join('?' * len(taken))})"
        )
        with self._db.writing(0.0):
            grown = []
            for key, uses, last in self._db.execute(held, tuple(taken)):
                count, now = taken[key]
                before = 0.0 if last is None else decayed(uses, last, now)
                grown.append((key, before + count, now))
            self._db.execute_many("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", grown)

    def _select(self, rest: str, values: tuple[Any, ...]) -> list[Stamped]:
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM objects {rest}", values)
        wrong, found = [], []
        for row in rows:
            try:
                if self._digest(row[:-1]) != row[-1]:
                    raise ValueError("its digest does not match")
                found.append(self._stamped(row))
            except (KameraError, AttributeError, TypeError, ValueError):
                wrong.append(row[0])
        if wrong:
            raise _Wrong(wrong)
        return found

    def _digest(self, row: tuple[Any, ...]) -> str:
        return self._sign(json.dumps(row))

    def _row(self, info: ObjectInfo, stamp: str) -> tuple[Any, ...]:
        context = info.context
        row = (
            info.key,
            info.kind,
            self._veil(info.chunk_id),
            self._veil(context.fingerprint),
            self._veil(context.anchor),
            self._veil(context.tenant),
            json.dumps([self._veil(chunk) for chunk in info.antecedents]),
            info.tokens,
            info.rank,
            info.formed,
            info.bytes,
            info.created,
            stamp,
            self._veil(context.kv),
        )
        return (*row, self._digest(row))

    def _stamped(self, row: tuple[Any, ...]) -> Stamped:
        key, kind, chunk, fingerprint, anchor, tenant, antecedents, tokens, rank, formed = row[:10]
        info = ObjectInfo(
            key=key,
            kind=kind,
            chunk_id=self._unveil(chunk),
            context=Context(*map(self._unveil, (fingerprint, anchor, tenant, row[13]))),
            antecedents=tuple(map(self._unveil, json.loads(antecedents))),
            tokens=tokens,
            rank=rank,
            formed=formed,
            bytes=row[10],
            created=row[11],
        )
        return info, row[12]


def decayed(uses: float, since: float, now: float) -> float:
    """What ``uses`` counted up to the time ``since`` are worth ``now``."""
    return float(uses * 2 ** (-max(0.0, now - since) / HALF_LIFE))


def _times(stamp: str) -> str:
    """Size and time of a stamp, which a copy keeps."""
    return stamp.partition("-")[2]


_COLUMNS = (
    "key, kind, chunk_id, fingerprint, anchor, tenant, antecedents, tokens, rank, formed, bytes, "
    "created, stamp, kv, mac"
)
_INSERT = f"INSERT OR REPLACE INTO objects ({_COLUMNS}) VALUES ({', '.join('?' * 15)})"
