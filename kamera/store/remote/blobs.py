"""The interface of a remote: bytes under names. A driver is one file that implements it for one service."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kamera.errors import ForkedStore
from kamera.store.pins import PinCell

OBJECTS = "objects/"
QUARANTINE = "quarantine/"
BOOK = "keep.json"
"""The blob of the pins."""


class BlobHead(NamedTuple):
    """The first bytes of a blob, and its whole size in bytes."""

    data: bytes
    size: int


class Blobs(Protocol):
    """Blobs by name, each stored whole or not at all. Safe to use from several threads.

    Requested names are `BOOK`, or `OBJECTS` or `QUARANTINE` and a name that the store made, so never input
    from outside. A foreign key there fails no call about other names. A call ends within bounded time, and
    raises only ``errors`` or a `KameraError` that does not mean an outage (an operation the service cannot
    do, a foreign value in the place of a blob).
    """

    url: str
    """Its address without credentials, fit for a log."""
    errors: tuple[type[Exception], ...]
    """Errors its calls raise when the service does not answer, or refuses."""

    def get(self, name: str) -> bytes | None:
        """The whole blob; None if there is none. `ForeignKey` for a key that is not a blob."""
        ...

    def read_heads(self, names: Sequence[str], length: int) -> list[BlobHead | None]:
        """The first ``length`` bytes of each blob, or all of a shorter one; no bytes of a foreign key."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store a blob, replacing any of that name; it is stored when this returns."""
        ...

    def replace(self, name: str, data: bytes | None, expected: bytes | None) -> bool:
        """Store ``data`` if the blob ``name`` still is ``expected``; return True if it was. None: no blob.

        Compare and replace are one step, so a concurrent write by another client is never lost.
        """
        ...

    def marks(self, folder: str) -> Mapping[str, str | None]:
        """Names of all blobs that begin with ``folder``, without order, each with its mark.

        Foreign keys are among them, of any name. Raises `StoreError` if one keeps the service's library from
        listing the rest. A mark is a text that changes whenever the blob does; None if the service has none.
        """
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Remove blobs; absent ones are ignored."""
        ...

    def close(self) -> None:
        """Close the connections; nothing works afterwards."""
        ...


class BlobCell(PinCell):
    """The text of a book of pins in a blob: every client that collects there honours it."""

    def __init__(self, blobs: Blobs) -> None:
        self.where = f"{blobs.url} {BOOK}"
        self._blobs = blobs

    def get(self) -> bytes | None:
        return self._blobs.get(BOOK)

    def replace(self, data: bytes, expected: bytes | None) -> bool:
        return self._blobs.replace(BOOK, data, expected)


_users: dict[str, int] = {}  # by library: the process that has its threads


def refuse_child(library: str, url: str) -> None:
    """Raise `ForkedStore` in a child of the process that has used ``library``: a call would never return."""
    user = _users.setdefault(library, os.getpid())
    if user != os.getpid():
        raise ForkedStore(
            f"cannot open {url}: process {user}, which this one was forked from, has used {library}, and its "
            "library's threads are not here: start workers by spawn, or open them in children alone"
        )
