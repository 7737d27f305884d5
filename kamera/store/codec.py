"""How the objects of one store become files: their names, their bytes, and what a header says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from kamera.store import format as object_format
from kamera.store.info import ObjectInfo
from kamera.store.records import CanonicalRecord, PatchRecord


@dataclass(frozen=True)
class Codec:
    """The plain one: an object is called what its key is, and its file is as `format` writes it.

    Tiers know objects by their *name* only, and see their bytes only through here.
    """

    def name(self, key: str) -> str:
        """What the object under ``key`` is called in every tier: 64 lower-case hex digits."""
        return key

    def encode(self, record: CanonicalRecord | PatchRecord, created: float) -> bytes:
        """The file of ``record``. Raises as `format.encode`."""
        return object_format.encode(record, created)

    def decode(self, data: bytes, name: str, source: str) -> CanonicalRecord | PatchRecord:
        """The record in ``data``, which must be the object called ``name``. Raises as `format.decode`."""
        return object_format.decode(data, name, source)

    def read_info(self, file: BinaryIO, size: int, name: str, source: str) -> ObjectInfo:
        """What the header of a file of ``size`` bytes says, unverified. Raises as `format.decode`."""
        return object_format.read_info(file, size, name, source)

    def describe(self, record: CanonicalRecord | PatchRecord, created: float, size: int) -> ObjectInfo:
        """What `read_info` says of the file of ``record``."""
        return object_format.describe(record, created, size)
