"""Which files of a cache directory the remote has: what is not in here still has to be sent.

So whatever is lost of it, and whoever dies between writing a file and a row, costs an upload done
twice, and never an object.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from kamera.errors import StoreError
from kamera.store.disk.database import Database, exists

LEDGER = "uploads.sqlite"
"""What the file is called in a cache directory."""

_SCHEMA = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS sent (name TEXT PRIMARY KEY, stamp TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS remote (url TEXT NOT NULL);
"""


def remote_of(directory: Path) -> str | None:
    """The url (without credentials) of the remote that ``directory`` is the cache of; None if of none."""
    path = directory / LEDGER
    if not exists(path):
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
            return str(db.execute("SELECT url FROM remote").fetchone()[0])
    except (sqlite3.Error, TypeError):  # it is made anew by whoever opens the remote
        return "a remote"


class Ledger:
    """Stamps of the files that the remote ``url`` confirmed. Safe to use from threads and processes.

    Raises `StoreError` if the directory is the cache of another remote.
    """

    def __init__(self, path: Path, url: str) -> None:
        self._url = url
        self._db = Database(path, _SCHEMA, _TABLES, self._start)
        if self._db.version == 0:
            self._start()
        claimed = {owner for (owner,) in self._db.execute("SELECT url FROM remote")}
        if claimed != {url}:
            self._db.close()
            raise StoreError(
                f"{path.parent} is the cache of {', '.join(sorted(claimed))}, not of {url}: give each "
                "remote a directory of its own"
            )

    def add(self, name: str, stamp: str) -> None:
        """The remote has the file of ``stamp``."""
        self._db.execute("INSERT OR REPLACE INTO sent VALUES (?, ?)", (name, stamp))

    def drop(self, name: str) -> None:
        """There is no such file any more."""
        self._db.execute("DELETE FROM sent WHERE name = ?", (name,))

    def stamps(self) -> dict[str, str]:
        """Name and stamp of every file that was confirmed; some may be gone or replaced since."""
        return dict(self._db.execute("SELECT name, stamp FROM sent"))

    def renew(self, name: str, old: str, new: str) -> None:
        """What is known of the file of stamp ``old`` is true of that of ``new``."""
        self._db.execute("UPDATE sent SET stamp = ? WHERE name = ? AND stamp = ?", (new, name, old))

    def scrub(self) -> str | None:
        """Leave no trace of deleted rows; None, or what may be left, and why."""
        return self._db.scrub()

    def close(self) -> None:
        """Close the database; nothing works afterwards."""
        self._db.close()

    def _start(self) -> None:
        with self._db.writing():
            if self._db.version == 0:
                self._db.execute("DELETE FROM remote")
                self._db.execute("INSERT INTO remote VALUES (?)", (self._url,))
                self._db.execute(f"PRAGMA user_version = {_SCHEMA}")
