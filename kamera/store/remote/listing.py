"""Listing of many blobs by their fronts; a front is read again only when its blob has changed.

If the service marks its blobs (entity tags), a listing without changes reads no blob. If not (Redis), the
first `MARK_BYTES` of the known blobs are read, thousands in one round trip: they include the digest of a
plain or sealed object and the nonces of an encrypted one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

from kamera.store.remote.blobs import Head
from kamera.store.remote.guard import Guard

MARK_BYTES = 128
BOUND = 50_000
"""Most blobs remembered; those beyond are read each time."""

_BATCH = 256  # fronts read at a time

Said = TypeVar("Said")


class _Known(NamedTuple, Generic[Said]):
    mark: str
    said: Said


class Listing(Generic[Said]):
    """The blobs of one ``folder`` whose names are ``wanted``, by name. Safe to use from several threads.

    ``read`` turns a name and its first ``front`` bytes into the listed value; None: the blob is left out.
    """

    def __init__(
        self,
        blobs: Guard,
        folder: str,
        wanted: Callable[[str], bool],
        front: int,
        read: Callable[[str, Head], Said | None],
        bound: int = BOUND,
    ) -> None:
        self._blobs = blobs
        self._folder = folder
        self._wanted = wanted
        self._front = front
        self._read = read
        self._bound = bound
        self._lock = threading.Lock()
        self._known: dict[str, _Known[Said]] = {}

    def names(self) -> list[str]:
        """The names alone, sorted."""
        return sorted(self._marks())

    def strangers(self) -> list[str]:
        """Names of foreign keys in the folder, sorted."""
        start = len(self._folder)
        found = (name[start:] for name in self._blobs.listed(self._folder) if name.startswith(self._folder))
        return sorted(name for name in found if not self._wanted(name))

    def __call__(self) -> Iterator[Said]:
        """The values of all blobs, by name. Raises `RemoteUnavailable`."""
        marks = self._marks()
        with self._lock:
            # removed blobs make room; the others stay in name order, in which a scan meets them again
            self._known = {name: known for name, known in self._known.items() if name in marks}
            known = dict(self._known)
        fresh = self._still(known, marks)
        names = sorted(marks)
        for i in range(0, len(names), _BATCH):
            batch = names[i : i + _BATCH]
            asked = [name for name in batch if name not in fresh]
            told = dict(zip(asked, self._fronts(asked), strict=True))
            for name in batch:
                said = fresh[name] if name in fresh else self._take(name, told[name], marks[name])
                if said is not None:
                    yield said

    def of(self, names: list[str]) -> list[Said | None]:
        """The values of the blobs ``names``; None for one that is absent or left out."""
        heads = self._fronts(names)
        return [
            None if head is None else self._read(name, head) for name, head in zip(names, heads, strict=True)
        ]

    def _marks(self) -> dict[str, str | None]:
        start = len(self._folder)
        listed = {name[start:]: mark for name, mark in self._blobs.listed(self._folder).items()}
        return {name: mark for name, mark in listed.items() if self._wanted(name)}

    def _still(self, known: dict[str, _Known[Said]], marks: dict[str, str | None]) -> dict[str, Said]:
        """The known values of unchanged blobs."""
        unmarked = [name for name in known if marks[name] is None]
        heads = self._blobs.heads([self._folder + name for name in unmarked], MARK_BYTES) if unmarked else []
        now = {name: mark for name, mark in marks.items() if mark is not None}
        now.update({n: _mark(head) for n, head in zip(unmarked, heads, strict=True) if head is not None})
        return {name: held.said for name, held in known.items() if now.get(name) == held.mark}

    def _fronts(self, names: list[str]) -> list[Head | None]:
        return self._blobs.heads([self._folder + name for name in names], self._front) if names else []

    def _take(self, name: str, head: Head | None, mark: str | None) -> Said | None:
        said = None if head is None else self._read(name, head)
        with self._lock:
            self._known.pop(name, None)
            if head is not None and said is not None and len(self._known) < self._bound:
                self._known[name] = _Known(_mark(head) if mark is None else mark, said)
        return said


def _mark(head: Head) -> str:
    return f"{head.size} {head.data[:MARK_BYTES].hex()}"
