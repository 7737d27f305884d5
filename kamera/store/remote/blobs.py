"""What a remote has to be: bytes under names. A driver is one file that does this for one kind of service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kamera.store.keys import is_key

OBJECTS = "objects/"
QUARANTINE = "quarantine/"


class Head(NamedTuple):
    """The first bytes of a blob, and how many there are in all."""

    data: bytes
    size: int


class Blobs(Protocol):
    """Blobs by name, each there whole or not at all. Safe to use from several threads.

    A name is `OBJECTS` or `QUARANTINE` and a name of the store's making, so never input from
    outside. A call ends within bounded time, and raises one of ``errors`` or nothing.
    """

    url: str
    """Where it is, without credentials: fit for a log."""
    errors: tuple[type[Exception], ...]
    """What its calls raise when the service does not answer, or says no."""

    def get(self, name: str) -> bytes | None:
        """The whole blob; None if there is none."""
        ...

    def heads(self, names: Sequence[str], length: int) -> list[Head | None]:
        """The first ``length`` bytes of each blob, or all of a shorter one."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store a blob, in place of the one of that name; it is there when this returns."""
        ...

    def delete(self, name: str) -> bool:
        """Remove a blob; whether there was one."""
        ...

    def set_aside(self, name: str, data: bytes, place: str) -> bool:
        """Rename the blob ``name`` to ``place`` if it still is ``data``; whether it was."""
        ...

    def names(self) -> list[str]:
        """Names of all blobs, without order."""
        ...

    def close(self) -> None:
        """Let go of connections; nothing works afterwards."""
        ...


def object_names(names: Sequence[str]) -> list[str]:
    """The objects among blobs' names, without their folder, sorted; anything else is not ours to judge."""
    found = (name[len(OBJECTS) :] for name in names if name.startswith(OBJECTS))
    return sorted(name for name in found if is_key(name))
