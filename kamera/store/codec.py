"""How the objects of one store become files: their names, their bytes, and what a header says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from kamera.store import format as object_format
from kamera.store.digests import DigestName
from kamera.store.format import DIRECTORY_VERSION
from kamera.store.info import ObjectInfo
from kamera.store.opened import Opened
from kamera.store.records import Record
from kamera.store.sources import Source


@dataclass(frozen=True)
class Codec:
    """The plain one: an object is called what its key is, and its file is as `format` writes it.

    Tiers know objects by their *name* only, and see their bytes only through here. ``digest`` is the
    hash under which tensors are written.
    """

    digest: DigestName = field(default="sha256", kw_only=True)

    def name(self, key: str) -> str:
        """What the object under ``key`` is called in every tier: 64 lower-case hex digits."""
        return key

    def encode(self, record: Record, created: float) -> bytes:
        """The file of ``record``. Raises as `format.encode`."""
        return object_format.encode(record, created, digest=self.digest)

    def open(self, source: Source, name: str, where: str) -> Opened:
        """The object called ``name`` in ``source``, to be read by groups.

        ``where`` names it in errors. Raises as `format.decode`, and `OSError`.
        """
        return object_format.open_object(source, name, where)

    def decode(self, data: bytes, name: str, source: str) -> Record:
        """The record in ``data``, which must be the object called ``name``. Raises as `format.decode`."""
        return object_format.decode(data, name, source)

    def read_info(self, file: BinaryIO, size: int, name: str, source: str) -> ObjectInfo:
        """What the header of a file of ``size`` bytes says, its digest verified. As `format.decode`."""
        return object_format.read_info(file, size, name, source)

    def describe(self, record: Record, created: float, size: int) -> ObjectInfo:
        """What `read_info` says of the file of ``record``."""
        return object_format.describe(record, created, size)

    @property
    def marker(self) -> dict[str, Any]:
        """What `kamera-store.json` says in a directory of such objects."""
        return {"format": DIRECTORY_VERSION}

    def sign_row(self, text: str) -> str:
        """A digest of a row of the index, so that one that was not written here is told."""
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def veil(self, text: str) -> str:
        """How the index holds an id: equal ids alike, so that it can look for them."""
        return text

    def unveil(self, text: str) -> str:
        """The id that `veil` made ``text`` of."""
        return text
