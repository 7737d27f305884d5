"""What an index notes of objects beside their rows: how they are used, and which files a remote has.

Both may be lost: an object counts as less used then, or is sent again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from kamera.store.disk.database import Database, Unusable
from kamera.store.info import Weighed

logger = logging.getLogger(__name__)

HALF_LIFE = 7 * 86_400.0
"""Seconds after which a use counts half."""

_USES = 256  # objects whose uses are counted in memory before they are written


class Notes:
    """The notes in ``database``. Safe to use from several threads and processes; nothing here raises.

    ``clock`` returns seconds since 1970. ``read_only``: nothing is written.
    """

    def __init__(
        self, database: Database, clock: Callable[[], float] = time.time, *, read_only: bool
    ) -> None:
        self.clock = clock
        self._db = database
        self._read_only = read_only
        self._uses: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def count_use(self, key: str) -> None:
        """Count a use of ``key``. Uses are kept in memory and written at intervals: a crash loses a few."""
        with self._lock:
            count, _ = self._uses.get(key, (0, 0.0))
            self._uses[key] = count + 1, self.clock()
            is_due = len(self._uses) >= _USES
        if is_due:
            self.flush()

    def flush(self) -> None:
        """Write the uses counted so far; they are dropped if another process holds the database."""
        with self._lock:
            uses, self._uses = self._uses, {}
        if not uses or self._read_only:
            return
        try:
            with self._db.writing() as db:
                rows = []
                for key, (count, now) in uses.items():
                    row = db.execute("SELECT uses, used FROM uses WHERE key = ?", (key,)).fetchone()
                    old_uses = 0.0 if row is None else decay(row[0], row[1], now)
                    rows.append((key, old_uses + count, now, key))
                query = "SELECT ?, ?, ? WHERE EXISTS (SELECT 1 FROM objects WHERE key = ?)"
                db.executemany(f"INSERT OR REPLACE INTO uses {query}", rows)
        except Unusable as error:
            logger.debug("uses not counted: %s", error)

    def unsent_rows(self, rows: Iterable[Weighed]) -> list[Weighed]:
        """Those of ``rows`` whose files the remote did not confirm."""
        sent_stamps = dict(self._say("SELECT key, stamp FROM sent"))
        return [row for row in rows if sent_stamps.get(row.key) != row.stamp]

    def note_sent(self, key: str, stamp: str) -> None:
        """Note that the remote has the file of ``stamp``."""
        self._say("INSERT OR REPLACE INTO sent VALUES (?, ?)", key, stamp)

    def _say(self, sql: str, *values: str) -> list[Any]:
        with contextlib.suppress(Unusable):
            if not self._read_only:
                return self._db.execute(sql, values)
        return []


def decay(uses: float, since: float, now: float) -> float:
    """``uses`` counted up to the time ``since``, decayed to ``now``."""
    return float(uses * 2 ** (-max(0.0, now - since) / HALF_LIFE))
