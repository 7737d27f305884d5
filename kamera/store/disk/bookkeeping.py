"""Files and rows brought into agreement: the files are right, the rows follow."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from kamera.errors import CorruptChunk, StoreVersionError, WrongKey
from kamera.store.disk.files import ObjectFiles
from kamera.store.disk.index import Index, Stamped
from kamera.store.info import ObjectInfo

logger = logging.getLogger(__name__)

LEFT_IN_PLACE = (StoreVersionError, WrongKey)
"""Refusals that say nothing against the object: whoever can read it still finds it."""


class Bookkeeping:
    """The rows of one directory. Raises `OSError` from the files, `StoreError` from the index.

    `repair` and `forget` look twice: at the row without holding the index, as nearly always there is
    nothing to do; and at the file while holding it, as another writer may just have brought a newer
    one.
    """

    def __init__(self, files: ObjectFiles, index: Index) -> None:
        self._files = files
        self._index = index

    def repair(self, info: ObjectInfo, stamp: str) -> None:
        """The file of ``stamp`` is of ``info``: have a row that says so."""
        row = self._index.get(info.key)
        if row is None or row[1] != stamp:
            with self._index.writing():
                if self._files.stamp(info.key) == stamp:
                    self._index.put(info, stamp)

    def forget(self, key: str, stamp: str | None = None) -> None:
        """Have no row of ``key`` while its file has ``stamp`` (None: is not there)."""
        if self._index.get(key) is not None:
            with self._index.writing():
                if self._files.stamp(key) == stamp:
                    self._index.drop(key)

    def settle(self, key: str) -> None:
        """Make the row of ``key`` say what its file says."""
        stamp = self._files.stamp(key)
        if stamp is None:
            return self.forget(key)
        row = self._index.get(key)
        if row is not None and row[1] == stamp:
            return None
        try:
            fresh = self._files.peek(key)
        except (CorruptChunk, *LEFT_IN_PLACE):
            return self.forget(key, stamp)
        return None if fresh is None else self.repair(*fresh)

    def agrees(self, key: str) -> bool:
        """Whether file, header and row of ``key`` are of one write."""
        row = self._index.get(key)
        if row is None or self._files.stamp(key) != row[1]:
            return False
        try:
            return self._files.peek(key) == row
        except (CorruptChunk, *LEFT_IN_PLACE):
            return False


def rows_of(files: ObjectFiles) -> Iterator[Stamped]:
    """The rows the files give by their headers. Raises `OSError`."""
    for key in files.names():
        try:
            found = files.peek(key)
        except (CorruptChunk, *LEFT_IN_PLACE) as error:
            # it stays where it is: reading it by key tells what is wrong with it
            logger.warning("not indexed: %s", error)
            continue
        if found is not None:
            yield found
