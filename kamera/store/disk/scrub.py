"""A SQLite file without what was deleted from it: neither in its free pages nor in its log."""

from __future__ import annotations

import sqlite3
from pathlib import Path

PATIENCE = 5.0
"""Seconds to wait for others who read or write the file."""


def scrub(db: sqlite3.Connection, path: Path, patience: float = PATIENCE) -> str | None:
    """Write the file anew from its rows and empty its log. None, or in one line what may be left, and why.

    ``secure_delete`` alone does not do: where SQLite moves rows between pages, copies stay behind.
    """
    [[before]] = db.execute("PRAGMA busy_timeout").fetchall()
    db.execute(f"PRAGMA busy_timeout = {int(patience * 1000)}")
    db.execute("PRAGMA temp_store = MEMORY")  # the copy it makes on the way is no file
    try:
        db.execute("VACUUM")
        # the rows are in the log now: only what it says of itself tells whether they are in the file
        busy, _, _ = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        why = "somebody reads it" if busy else None
    except sqlite3.OperationalError as error:
        if "locked" not in str(error) and "busy" not in str(error):
            raise
        why = str(error)
    finally:
        db.execute(f"PRAGMA busy_timeout = {before}")
    if why is None:
        return None
    return f"deleted rows may still be in {path.name} and {path.name}-wal ({why}): end that, and run it again"
