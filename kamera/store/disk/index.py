"""The index: one row per object, so that listing never opens the objects.

It only repeats what the files say, and counts how objects are used. Whoever loses it rebuilds it;
where it disagrees with the files, the files are right.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kamera.errors import StoreError
from kamera.store.disk.database import Database
from kamera.store.info import Census, KindCount, ObjectInfo
from kamera.store.keys import KINDS, Context

logger = logging.getLogger(__name__)

HALF_LIFE = 7 * 86_400.0
"""After how many seconds a use counts half."""

_SCHEMA = 2
_TABLES = """
PRAGMA secure_delete = ON;
CREATE TABLE IF NOT EXISTS objects (
    key TEXT PRIMARY KEY, kind TEXT NOT NULL, chunk_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL, anchor TEXT NOT NULL, tenant TEXT NOT NULL,
    antecedents TEXT NOT NULL, tokens INTEGER NOT NULL, rank INTEGER, formed TEXT,
    bytes INTEGER NOT NULL, created REAL NOT NULL, stamp TEXT NOT NULL, kv TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uses (
    key TEXT PRIMARY KEY, uses REAL NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_chunk ON objects (chunk_id, tenant, created, key);
CREATE INDEX IF NOT EXISTS by_age ON objects (tenant, created, key);
CREATE INDEX IF NOT EXISTS by_kind ON objects (tenant, kind, bytes);
"""
_PAGE = 1000  # rows read at a time: other threads get their turn between two pages
_USES_HELD = 256  # objects whose uses are counted in memory before they are written

Stamped = tuple[ObjectInfo, str]
"""A row: the object, and the stamp of the file it was read from."""


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


class Index:
    """Rows of objects in SQLite. Safe to use from several threads and processes.

    ``files`` yields the rows the files would give: a database that turns out damaged is filled from
    it on the spot. ``veil`` and ``unveil`` turn ids into what stands in the file for them, and back
    (see `Codec`). Raises `StoreError` when SQLite fails.
    """

    def __init__(
        self,
        path: Path,
        files: Callable[[], Iterable[Stamped]],
        veil: Callable[[str], str] = str,
        unveil: Callable[[str], str] = str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._files = files
        self._veil = veil
        self._unveil = unveil
        self._clock = clock
        self._uses: dict[str, tuple[int, float]] = {}
        self._uses_lock = threading.Lock()
        self._db = Database(path, _SCHEMA, _TABLES, self._refill)

    @property
    def complete(self) -> bool:
        """Whether it was ever filled from the files; if not, `rebuild` is due."""
        return self._db.version == _SCHEMA

    def put(self, info: ObjectInfo, stamp: str) -> None:
        """Write the row of an object whose file is in place."""
        self._db.execute(_INSERT, self._row(info, stamp))

    def get(self, key: str) -> Stamped | None:
        """The row of ``key``."""
        rows = self._select("WHERE key = ?", (key,))
        return rows[0] if rows else None

    def drop(self, key: str) -> None:
        """Delete the row of ``key``, if there is one."""
        self._db.execute("DELETE FROM objects WHERE key = ?", (key,))
        self._db.execute("DELETE FROM uses WHERE key = ?", (key,))

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
        while limit is None or limit > 0:
            count = _PAGE if limit is None else min(_PAGE, limit)
            rows = self._select(f"{page} ORDER BY created, key LIMIT ? OFFSET ?", (*behind, count, offset))
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
            for kind, count, total in self._db.execute(sql, (self._veil(tenant),))
        }
        return {kind: found.get(kind, KindCount(0, 0)) for kind in KINDS}

    def census(self, tenant: str, kind: str | None = None) -> Census:
        """`kinds`, and how many chunks and contexts these objects are of."""
        kinds = {name: held for name, held in self.kinds(tenant).items() if kind in (None, name)}
        where = "tenant = ?" if kind is None else "tenant = ? AND kind = ?"
        values = (self._veil(tenant),) if kind is None else (self._veil(tenant), kind)
        [[chunks]] = self._db.execute(f"SELECT COUNT(DISTINCT chunk_id) FROM objects WHERE {where}", values)
        contexts = f"SELECT DISTINCT fingerprint, anchor, kv FROM objects WHERE {where}"
        [[count]] = self._db.execute(f"SELECT COUNT(*) FROM ({contexts})", values)
        by_form = f"SELECT kv, COUNT(*), SUM(bytes) FROM objects WHERE {where} GROUP BY kv"
        rows = [(self._unveil(kv), *held) for kv, *held in self._db.execute(by_form, values)]
        return Census(kinds, chunks, count, {form: KindCount(*held) for form, *held in sorted(rows)})

    def weighed(self, tenant: str | None = None) -> Iterator[Weighed]:
        """All objects of a tenant (None: of everyone) with their uses, in no order; ids stay veiled."""
        self.flush_uses()
        # the plus keeps SQLite on the primary key: by tenant it would sort the whole store for every page
        after, mine = "", "" if tenant is None else "AND +tenant = ?"
        sql = (
            "SELECT key, kind, chunk_id, fingerprint, anchor, tenant, tokens, bytes, created, stamp, "
            f"COALESCE(uses, 0), used, kv FROM objects LEFT JOIN uses USING (key) WHERE key > ? {mine} "
            f"ORDER BY key LIMIT {_PAGE}"
        )
        while rows := self._db.execute(sql, (after,) if tenant is None else (after, self._veil(tenant))):
            yield from (Weighed(*row) for row in rows)
            after = rows[-1][0]

    def used(self, key: str) -> None:
        """Count a use of ``key``. Kept in memory and written now and then: a crash forgets a few."""
        with self._uses_lock:
            count, _ = self._uses.get(key, (0, 0.0))
            self._uses[key] = count + 1, self._clock()
            due = len(self._uses) >= _USES_HELD
        if due:
            self.flush_uses()

    def flush_uses(self) -> None:
        """Write the uses counted so far; where another process holds the index they are dropped."""
        with self._uses_lock:
            taken, self._uses = self._uses, {}
        names = list(taken)
        if not names:
            return
        try:
            with self._db.impatient():
                for i in range(0, len(names), _USES_HELD):
                    self._add_uses({name: taken[name] for name in names[i : i + _USES_HELD]})
        except StoreError as error:
            logger.debug("uses not counted: %s", error)

    def rebuild(self, objects: Iterable[Stamped]) -> int:
        """Replace all rows by ``objects``, which are drawn while `writing`; how many there are.

        What is known of the uses of objects that are still there stays.
        """
        with self.writing():
            self._fill(objects)
        [[count]] = self._db.execute("SELECT COUNT(*) FROM objects")
        return int(count)

    def check(self) -> str | None:
        """Read the whole database; what is wrong with it is told, and it is filled anew."""
        problem = str(self._db.execute("PRAGMA quick_check(1)")[0][0])
        if problem == "ok":
            return None
        self._db.damaged(problem)
        return problem

    def scrub(self) -> str | None:
        """Leave no trace of deleted rows; None, or what may be left, and why."""
        return self._db.scrub()

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Hold the index against every other writer, of this process and of others.

        A file and its row change together inside; on an exception the rows are as before.
        """
        return self._db.writing()

    def close(self) -> None:
        """Close the database; nothing works afterwards."""
        self.flush_uses()
        self._db.close()

    def _refill(self) -> None:
        with self.writing():
            if not self.complete:  # another process may have been faster
                self._fill(self._files())

    def _fill(self, objects: Iterable[Stamped]) -> None:
        self._db.execute("DELETE FROM objects")
        self._db.execute_many(_INSERT, (self._row(info, stamp) for info, stamp in objects))
        self._db.execute("DELETE FROM uses WHERE key NOT IN (SELECT key FROM objects)")
        self._db.execute(f"PRAGMA user_version = {_SCHEMA}")

    def _add_uses(self, taken: dict[str, tuple[int, float]]) -> None:
        held = (
            "SELECT key, uses, used FROM objects LEFT JOIN uses USING (key) "
            f"WHERE key IN ({', '.join('?' * len(taken))})"
        )
        with self._db.writing():
            grown = []
            for key, uses, last in self._db.execute(held, tuple(taken)):
                count, now = taken[key]
                before = 0.0 if last is None else decayed(uses, last, now)
                grown.append((key, before + count, now))
            self._db.execute_many("INSERT OR REPLACE INTO uses VALUES (?, ?, ?)", grown)

    def _select(self, rest: str, values: tuple[Any, ...]) -> list[Stamped]:
        sql = f"SELECT {_COLUMNS} FROM objects {rest}"
        try:
            return [self._stamped(row) for row in self._db.execute(sql, values)]
        except (TypeError, ValueError) as error:  # no row that was written here
            self._db.damaged(f"a row makes no sense: {error}")
            return [self._stamped(row) for row in self._db.execute(sql, values)]

    def _row(self, info: ObjectInfo, stamp: str) -> tuple[Any, ...]:
        context = info.context
        return (
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


_COLUMNS = (
    "key, kind, chunk_id, fingerprint, anchor, tenant, antecedents, tokens, rank, formed, bytes, "
    "created, stamp, kv"
)
_INSERT = f"INSERT OR REPLACE INTO objects ({_COLUMNS}) VALUES ({', '.join('?' * 14)})"
