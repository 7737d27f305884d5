"""What the tiers below memory have in common, by which the upkeep of a store walks them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kamera.store.info import ObjectInfo, Quarantined, Weighed
from kamera.store.records import Record


class File(NamedTuple):
    """The bytes of an object as stored, and the stamp of its file ("" in a remote)."""

    data: bytes
    stamp: str = ""


class Fetched(NamedTuple):
    """A verified object, its description, and what it was read from (of a directory without the bytes)."""

    record: Record
    info: ObjectInfo
    file: File


class Lower(Protocol):
    """Objects in a directory or a remote, by name. Safe to use from several threads and processes.

    Every name passed in is one of its codec. Raises the errors of its medium, as `StoreError`.
    """

    url: str
    """Its address, fit for a log."""

    def names(self) -> list[str]:
        """Names of all objects; a directory's of all tenants."""
        ...

    def strangers(self) -> list[str]:
        """One line for each thing in the place of an object that is none."""
        ...

    def read(self, name: str) -> Fetched | None:
        """The object ``name``, verified to the last byte; None if there is none.

        Anything else there goes to quarantine, and `CorruptChunk` is raised. Raises `StoreVersionError` and
        `WrongKey` as `Codec.decode`: then it stays where it is.
        """
        ...

    def read_file(self, name: str) -> File | None:
        """The bytes of the object ``name``, verified; otherwise as `read`."""
        ...

    def load(self, name: str) -> File | None:
        """The bytes under ``name``, unverified; not counted as a use."""
        ...

    def weighed(self, tenant: str | None) -> Iterator[Weighed]:
        """The objects that may be collected, of all tenants of a directory if ``tenant`` is None."""
        ...

    def adopt(self, info: ObjectInfo, data: bytes) -> str | None:
        """Store an object that was written elsewhere; return its stamp, or None if one is there: it stays."""
        ...

    def copies(self) -> list[Quarantined]:
        """All copies in quarantine, by name and time; of all tenants of a directory."""
        ...

    def copy_info(self, file: str) -> ObjectInfo | None:
        """The description of a copy from its header, of any tenant; None if it cannot be read."""
        ...

    def read_copy(self, file: str) -> bytes:
        """The bytes of a copy, unverified. Raises `CorruptChunk` if it was deleted meanwhile."""
        ...

    def purge(self, file: str) -> None:
        """Delete a copy."""
        ...
