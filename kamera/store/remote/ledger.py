"""Record of the files of a cache directory that the remote has; all others still have to be sent.

So a lost row, or a process that dies between writing a file and its row, costs a repeated upload, and
never an object. The remote that the directory caches cannot be rebuilt; `disk.keep` holds it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kamera.errors import StoreError
from kamera.store.disk.database import Unusable
from kamera.store.disk.index import Index
from kamera.store.disk.keep import Keep

logger = logging.getLogger(__name__)


def remote_of(directory: Path) -> str | None:
    """The url (without credentials) of the remote that ``directory`` caches; None if it caches none."""
    url: str | None = Keep(directory).read()["remote"]
    return url


class Ledger:
    """Stamps of the files that the remote ``url`` confirmed, in the database of ``index``.

    Safe to use from threads and processes. Raises `StoreError` if the directory is the cache of another
    remote, but not for a database that cannot be used: then nothing counts as sent.
    """

    def __init__(self, directory: Path, index: Index, url: str) -> None:
        self._index = index
        with Keep(directory).changing() as said:
            if said["remote"] not in (None, url):
                raise StoreError(
                    f"{directory} is the cache of {said['remote']}, not of {url}: give each remote a "
                    "directory of its own"
                )
            said["remote"] = url

    def add(self, name: str, stamp: str) -> None:
        """Note that the remote has the file of ``stamp``."""
        self._say("INSERT OR REPLACE INTO sent VALUES (?, ?)", name, stamp)

    def drop(self, name: str) -> None:
        """Note that the file is gone."""
        self._say("DELETE FROM sent WHERE name = ?", name)

    def stamps(self) -> dict[str, str]:
        """Name and stamp of every file that was confirmed; some may be gone or replaced since."""
        return dict(self._say("SELECT name, stamp FROM sent"))

    def renew(self, name: str, old: str, new: str) -> None:
        """Transfer the row of the file of stamp ``old`` to stamp ``new``."""
        self._say("UPDATE sent SET stamp = ? WHERE name = ? AND stamp = ?", new, name, old)

    def _say(self, sql: str, *values: str) -> list[Any]:
        try:
            if sql.startswith("SELECT"):
                return self._index.database.execute(sql)
            with self._index.database.writing():
                return self._index.database.execute(sql, values)
        except Unusable as error:
            logger.warning("what was sent is not noted, and sent again: %s", error)
            return []
