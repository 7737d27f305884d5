"""Which files of a cache directory the remote has: what is not in here still has to be sent.

So whatever is lost of it, and whoever dies between writing a file and a row, costs an upload done
twice, and never an object. Whose cache the directory is cannot be made anew, and stands in `disk.keep`.
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
    """The url (without credentials) of the remote that ``directory`` is the cache of; None if of none."""
    url: str | None = Keep(directory).read()["remote"]
    return url


class Ledger:
    """Stamps of the files that the remote ``url`` confirmed, in the database of ``index``.

    Safe to use from threads and processes. Raises `StoreError` if the directory is the cache of another
    remote, and nothing for a database that cannot be used: then nothing counts as sent.
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
        """The remote has the file of ``stamp``."""
        self._say("INSERT OR REPLACE INTO sent VALUES (?, ?)", name, stamp)

    def drop(self, name: str) -> None:
        """There is no such file any more."""
        self._say("DELETE FROM sent WHERE name = ?", name)

    def stamps(self) -> dict[str, str]:
        """Name and stamp of every file that was confirmed; some may be gone or replaced since."""
        return dict(self._say("SELECT name, stamp FROM sent"))

    def renew(self, name: str, old: str, new: str) -> None:
        """What is known of the file of stamp ``old`` is true of that of ``new``."""
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
