"""The interface of a remote: bytes under names. A driver is one file that implements it for one service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

OBJECTS = "objects/"
QUARANTINE = "quarantine/"
PINS = "pins/"


class Head(NamedTuple):
    """The first bytes of a blob, and its whole size in bytes."""

    data: bytes
    size: int


class Blobs(Protocol):
    """Blobs by name, each stored whole or not at all. Safe to use from several threads.

    Requested names are `OBJECTS`, `QUARANTINE` or `PINS` and a name that the store made, so never input from
    outside. A foreign key there fails no call about other names. A call ends within bounded time, and raises
    only ``errors`` or a `KameraError` that does not mean an outage (an operation the service cannot do, a
    foreign value in the place of a blob).
    """

    url: str
    """Its address without credentials, fit for a log."""
    errors: tuple[type[Exception], ...]
    """Errors its calls raise when the service does not answer, or refuses."""

    def get(self, name: str) -> bytes | None:
        """The whole blob; None if there is none. `ForeignKey` for a key that is not a blob."""
        ...

    def heads(self, names: Sequence[str], length: int) -> list[Head | None]:
        """The first ``length`` bytes of each blob, or all of a shorter one; no bytes of a foreign key."""
        ...

    def present(self, names: Sequence[str]) -> list[bool]:
        """For each of ``names``, True if there is such a blob; no content is read."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store a blob, replacing any of that name; it is stored when this returns."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Store a blob unless there is one of that name, which then stays; return True if it was stored."""
        ...

    def exchange(self, name: str, old: bytes, new: bytes) -> bool:
        """Store ``new`` in place of the blob ``name`` if that still is ``old``; return True if it was.

        Compare and replace are one step, so a concurrent write by another client is never lost.
        """
        ...

    def delete(self, name: str) -> bool:
        """Remove a blob; return True if it existed."""
        ...

    def discard(self, names: Sequence[str]) -> None:
        """Remove many blobs; absent ones are ignored."""
        ...

    def set_aside(self, name: str, data: bytes, place: str) -> bool:
        """Rename the blob ``name`` to ``place`` if it still is ``data``; return True if it was."""
        ...

    def listed(self, folder: str) -> Mapping[str, str | None]:
        """Names of all blobs that begin with ``folder``, without order, each with its mark.

        Foreign keys are among them, of any name. Raises `StoreError` if one keeps the service's library from
        listing the rest. A mark is a text that changes whenever the blob does; None if the service has none.
        """
        ...

    def close(self) -> None:
        """Close the connections; nothing works afterwards."""
        ...
