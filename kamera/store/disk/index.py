"""The index: one row per object, so that listing never opens the objects; and the objects' uses.

It only repeats the files' headers (`following`): it is a cache, and a look-up by key does not need it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kamera.errors import KameraError
from kamera.store.disk.compared import Files
from kamera.store.disk.database import Unusable
from kamera.store.disk.following import Following, WrongRows
from kamera.store.disk.rows import COLUMNS, Stamped
from kamera.store.info import Census, KindCount, ObjectInfo
from kamera.store.keys import KINDS, PATCH_KINDS, Context

logger = logging.getLogger(__name__)

HALF_LIFE = 7 * 86_400.0
"""Seconds after which a use counts half."""

_PAGE = 1000  # rows read at a time: other threads may run between two pages
_USES_HELD = 256  # objects whose uses are counted in memory before they are written


class Weighed(NamedTuple):
    """The data of an object for `gc`: ``uses`` decayed to the time ``used`` (0 and None: never used)."""

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
    base: str = ""

    @property
    def group(self) -> tuple[str, ...]:
        """Equal for a canonical and its patches; unique for an encoding or an anchor."""
        if self.kind == "encoding":
            return self.chunk_id, self.fingerprint, self.tenant
        anchor = (self.base if self.kind in PATCH_KINDS else "") or self.anchor
        return self.chunk_id, self.fingerprint, anchor, self.tenant, self.kv

    @property
    def encoding(self) -> tuple[str, ...]:
        """The `group` of the encoding that a canonical refers to; for any other object, of no object."""
        return (self.chunk_id, self.base, self.tenant) if self.kind == "canonical" and self.base else ()


class Index(Following):
    """Queries over the rows, whose ids are veiled by `Codec.veil`; as `Following`."""

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
        super().__init__(path, files, veil, unveil, sign, read_only)
        self._veil = veil
        self._unveil = unveil
        self._clock = clock
        self._uses: dict[str, tuple[int, float]] = {}

    def get(self, key: str) -> Stamped | None:
        """The row of ``key``, not compared with its file; None if absent or unreadable."""
        try:
            rows = self._select("WHERE key = ?", (key,))
        except (Unusable, WrongRows):
            return None
        return rows[0] if rows else None

    def keys(self) -> set[str]:
        """The keys of all rows, not compared with the files."""
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
        """Objects of a tenant, oldest first, read in pages: ``limit`` of them after ``offset``."""
        ids = {"tenant": tenant, "chunk_id": chunk_id, **_columns(context)}
        wanted = {name: self._veil(value) for name, value in ids.items() if value is not None}
        wanted.update({} if kind is None else {"kind": kind})
        where = "WHERE " + " AND ".join(f"{name} = ?" for name in wanted)
        values: tuple[Any, ...] = tuple(wanted.values())
        page, behind = where, values
        while limit is None or limit > 0:
            count = _PAGE if limit is None else min(_PAGE, limit)
            rows = self._page(f"{page} ORDER BY created, key LIMIT ? OFFSET ?", (*behind, count, offset))
            yield from (info for info, _ in rows)
            if len(rows) < count:
                return
            last, offset = rows[-1][0], 0
            limit = None if limit is None else limit - count
            page, behind = f"{where} AND (created, key) > (?, ?)", (*values, last.created, last.key)

    def names_of(self, kind: str, context: Context) -> list[str]:
        """Names of the objects of a kind and context, oldest first."""
        wanted = {name: self._veil(value) for name, value in _columns(context).items()} | {"kind": kind}
        where = " AND ".join(f"{name} = ?" for name in wanted)
        sql = f"SELECT key FROM objects WHERE {where} ORDER BY created, key"
        return [key for (key,) in self._answer(lambda: self._db.execute(sql, tuple(wanted.values())))]

    def correct(self, info: ObjectInfo, stamp: str) -> bool:
        """Write the row of the verified file of ``stamp``; return True if it replaced another row."""
        row = self.get(info.key)
        if row == (info, stamp) or self._files.stamp(info.key) != stamp:
            return False
        self.put([(info, stamp)])
        return row is not None

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
        """Number and bytes of a tenant's objects of each kind; no row is read for it."""
        sql = "SELECT kind, COUNT(*), SUM(bytes) FROM objects WHERE tenant = ? GROUP BY kind"
        found = {
            kind: KindCount(count, total)
            for kind, count, total in self._answer(lambda: self._db.execute(sql, (self._veil(tenant),)))
        }
        return {kind: found.get(kind, KindCount(0, 0)) for kind in KINDS}

    def census(self, tenant: str, kind: str | None = None) -> Census:
        """`kinds`, and the numbers of chunks and contexts of these objects."""
        kinds = {name: held for name, held in self.kinds(tenant).items() if kind in (None, name)}
        where = "tenant = ?" if kind is None else "tenant = ? AND kind = ?"
        values = (self._veil(tenant),) if kind is None else (self._veil(tenant), kind)
        chunks = f"SELECT COUNT(DISTINCT chunk_id) FROM objects WHERE {where} AND kind != 'anchor'"
        contexts = (
            f"SELECT COUNT(*) FROM (SELECT DISTINCT fingerprint, anchor, kv FROM objects WHERE {where} "
            "AND kind NOT IN ('anchor', 'encoding'))"
        )
        by_form = f"SELECT kv, COUNT(*), SUM(bytes) FROM objects WHERE {where} GROUP BY kv"
        held, of, forms = self._answer(
            lambda: [self._db.execute(sql, values) for sql in (chunks, contexts, by_form)]
        )
        found = sorted((self._unveil(kv), KindCount(*count)) for kv, *count in forms)
        return Census(kinds, held[0][0], of[0][0], dict(found))

    def bytes(self) -> int:
        """The bytes of all objects, of all tenants."""
        sql = "SELECT COALESCE(SUM(bytes), 0) FROM objects"
        return int(self._answer(lambda: self._db.execute(sql))[0][0])

    def of_chunk(self, chunk_id: str, tenant: str) -> list[ObjectInfo]:
        """The objects made of a chunk: its own, and patches of others formed behind it."""
        veiled = self._veil(chunk_id)
        where = "WHERE tenant = ? AND (chunk_id = ? OR instr(antecedents, ?) > 0) ORDER BY created, key"
        rows = self._page(where, (self._veil(tenant), veiled, json.dumps(veiled)))
        found = [info for info, _ in rows]
        return [info for info in found if chunk_id in (info.chunk_id, *info.antecedents)]

    def contexts(self, tenant: str) -> list[Context]:
        """The contexts of a tenant's objects."""
        sql = "SELECT DISTINCT fingerprint, anchor, tenant, kv FROM objects WHERE tenant = ?"
        rows = self._answer(lambda: self._db.execute(sql, (self._veil(tenant),)))
        return [Context(*map(self._unveil, row)) for row in rows]

    def last_use(self, key: str) -> float | None:
        """Time of the last known use of ``key`` (seconds since 1970)."""
        with self._held:
            if key in self._uses:
                return self._uses[key][1]
        with contextlib.suppress(Unusable):
            for (used,) in self._db.execute("SELECT used FROM uses WHERE key = ?", (key,)):
                return float(used)
        return None

    def weighed(self, tenant: str | None = None) -> Iterator[Weighed]:
        """All objects of a tenant (None: of all tenants) with their uses, in no order; ids stay veiled."""
        self.flush_uses()
        # the plus keeps SQLite on the primary key: by tenant it would sort the whole store for every page
        after, only = "", "" if tenant is None else "AND +tenant = ?"
        sql = (
            "SELECT key, kind, chunk_id, fingerprint, anchor, tenant, tokens, bytes, created, stamp, "
            f"COALESCE(uses, 0), used, kv, base FROM objects LEFT JOIN uses USING (key) WHERE key > ? {only} "
            f"ORDER BY key LIMIT {_PAGE}"
        )
        mine = () if tenant is None else (self._veil(tenant),)

        def page() -> list[Any]:
            return self._db.execute(sql, (after, *mine))

        while rows := self._answer(page):
            yield from (Weighed(*row) for row in rows)
            after = rows[-1][0]

    def unused_since(self, when: float) -> list[str]:
        """Objects neither made nor used after ``when`` (seconds since 1970), of all tenants."""
        self.flush_uses()
        sql = "SELECT key FROM objects LEFT JOIN uses USING (key) WHERE COALESCE(used, created) < ?"
        return [key for (key,) in self._answer(lambda: self._db.execute(sql, (when,)))]

    def used(self, key: str) -> None:
        """Count a use of ``key``. Uses are kept in memory and written at intervals: a crash loses a few."""
        with self._held:
            count, _ = self._uses.get(key, (0, 0.0))
            self._uses[key] = count + 1, self._clock()
            due = len(self._uses) >= _USES_HELD
        if due:
            self.flush_uses()

    def flush_uses(self) -> None:
        """Write the uses counted so far; they are dropped if another process holds the database."""
        with self._held:
            taken, self._uses = self._uses, {}
        names = list(taken)
        try:
            for i in range(0, len(names), _USES_HELD):
                self._add_uses({name: taken[name] for name in names[i : i + _USES_HELD]})
        except Unusable as error:
            logger.debug("uses not counted: %s", error)

    def close(self) -> None:
        """Write all pending data, and close the database."""
        if not self._closed:
            self.flush_uses()
        super().close()

    def _page(self, where: str, values: tuple[Any, ...]) -> list[Stamped]:
        return self._answer(lambda: self._select(where, values))

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
        rows = self._db.execute(f"SELECT {COLUMNS} FROM objects {rest}", values)
        wrong, found = [], []
        for row in rows:
            try:
                if not self._codec.is_ours(row):
                    raise ValueError("its digest does not match")
                found.append(self._codec.read(row))
            except (KameraError, AttributeError, TypeError, ValueError):
                wrong.append(row[0])
        if wrong:
            raise WrongRows(wrong)
        return found


def _columns(context: Context | None) -> dict[str, str]:
    """The columns of a context; there is none for what its backbone answers to the probe."""
    return {} if context is None else {n: v for n, v in vars(context).items() if n != "probe"}


def decayed(uses: float, since: float, now: float) -> float:
    """``uses`` counted up to the time ``since``, decayed to ``now``."""
    return float(uses * 2 ** (-max(0.0, now - since) / HALF_LIFE))
