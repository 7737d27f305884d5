"""Erasure of deleted data from a SQLite file: from its free pages and its log."""

from __future__ import annotations

import sqlite3
from pathlib import Path

PATIENCE = 5.0
"""Seconds to wait for other readers or writers of the file."""


def scrub(db: sqlite3.Connection, path: Path, patience: float = PATIENCE) -> str | None:
    """Rewrite the file from its rows and empty its log. None, or a line: the possible remains, and why.

    ``secure_delete`` alone does not suffice: when SQLite moves rows between pages, copies stay behind.
    """
    [[before]] = db.execute("PRAGMA busy_timeout").fetchall()
    db.execute(f"PRAGMA busy_timeout = {int(patience * 1000)}")
    db.execute("PRAGMA temp_store = MEMORY")  # its intermediate copy is not a file
    try:
        db.execute("VACUUM")
        # the rows are in the log now: only the checkpoint's result tells if they reached the file
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
