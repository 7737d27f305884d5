"""What a remote has to be: bytes under names. A driver is one file that does this for one kind of service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

OBJECTS = "objects/"
QUARANTINE = "quarantine/"
PINS = "pins/"


class Head(NamedTuple):
    """The first bytes of a blob, and how many there are in all."""

    data: bytes
    size: int


class Blobs(Protocol):
    """Blobs by name, each there whole or not at all. Safe to use from several threads.

    A name that is asked for is `OBJECTS`, `QUARANTINE` or `PINS` and a name of the store's making, so never
    input from outside. One key that others put there fails no call about the rest. A call ends within
    bounded time, and raises one of ``errors``, a `KameraError` that says nothing against the service (what
    it cannot do, what lies in the place of a blob), or nothing.
    """

    url: str
    """Where it is, without credentials: fit for a log."""
    errors: tuple[type[Exception], ...]
    """What its calls raise when the service does not answer, or says no."""

    def get(self, name: str) -> bytes | None:
        """The whole blob; None if there is none. `ForeignKey` for what is no blob."""
        ...

    def heads(self, names: Sequence[str], length: int) -> list[Head | None]:
        """The first ``length`` bytes of each blob, or all of a shorter one; of what is no blob, no bytes."""
        ...

    def present(self, names: Sequence[str]) -> list[bool]:
        """Whether there is such a blob, for each of ``names``; nothing of it is read."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store a blob, in place of the one of that name; it is there when this returns."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Store a blob unless there is one of that name, which then stays; whether it was stored."""
        ...

    def exchange(self, name: str, old: bytes, new: bytes) -> bool:
        """Store ``new`` in place of the blob ``name`` if that still is ``old``; whether it was.

        Whatever anybody else writes meanwhile stays: it is compared and replaced in one step.
        """
        ...

    def delete(self, name: str) -> bool:
        """Remove a blob; whether there was one."""
        ...

    def discard(self, names: Sequence[str]) -> None:
        """Remove many blobs, as far as they are there."""
        ...

    def set_aside(self, name: str, data: bytes, place: str) -> bool:
        """Rename the blob ``name`` to ``place`` if it still is ``data``; whether it was."""
        ...

    def listed(self, folder: str) -> Mapping[str, str | None]:
        """Names of all blobs that begin with ``folder``, without order, each with its mark.

        What others put there is among them, whatever its name. `StoreError` where that keeps the service's
        library from listing the rest. A mark is a text that changes whenever the blob does; None where the
        service tells none.
        """
        ...

    def close(self) -> None:
        """Let go of connections; nothing works afterwards."""
        ...
