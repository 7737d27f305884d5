"""A folder's files compared with the rows that describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kamera.store.disk.rows import Stamped


class Files(Protocol):
    """The files that the rows describe. Raises `OSError` or `StoreError`."""

    def shards(self) -> dict[str, int]:
        """The folders of files, by the prefix of their keys, and the time of each one's last change (ns)."""
        ...

    def stamps(self, shard: str) -> dict[str, str]:
        """Key and stamp of every file in a folder."""
        ...

    def stamp(self, key: str) -> str | None:
        """Stamp of one file; None if there is none."""
        ...

    def row(self, key: str) -> Stamped | None:
        """The contents of the file's header; None if there is no file, or it cannot be read."""
        ...


@dataclass(frozen=True)
class Difference:
    """Keys of files whose rows are wrong.

    ``moved``: size and time are those of the row, so the file was copied with its time, as in a restored
    backup, and only the stamp is new. ``unlike``: the row is missing, or is of another file.
    """

    moved: tuple[str, ...]
    unlike: tuple[str, ...]


def compared(files: Mapping[str, str], rows: Mapping[str, str]) -> Difference:
    """The difference of the stamps of a folder's ``files`` from those of its ``rows``, both by key."""
    changed = [key for key, stamp in files.items() if rows.get(key) != stamp]
    moved = {key for key in changed if key in rows and _times(rows[key]) == _times(files[key])}
    return Difference(tuple(sorted(moved)), tuple(key for key in changed if key not in moved))


def _times(stamp: str) -> str:
    """Size and time of a stamp, which a copy of the file keeps."""
    return stamp.partition("-")[2]
