"""Codec between the objects of one store and their files: names, bytes and headers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from kamera.store import format as object_format
from kamera.store.digests import DigestName
from kamera.store.fields import Header
from kamera.store.format import DIRECTORY_VERSION, LAYOUT
from kamera.store.head import info_of, written
from kamera.store.info import ObjectInfo
from kamera.store.opened import Opened
from kamera.store.records import Record
from kamera.store.sources import BytesSource, Source


@dataclass(frozen=True)
class Codec:
    """The plain codec: the name of an object is its key, and its file is as `format` writes it.

    Tiers know objects by their *name* only, and their bytes only through a codec. ``digest`` is the
    hash under which tensors are written.
    """

    digest: DigestName = field(default="sha256", kw_only=True)

    def name(self, key: str) -> str:
        """The name of the object under ``key`` in every tier: 64 lower-case hex digits."""
        return key

    def encode(self, record: Record, created: float) -> bytes:
        """The file of ``record``. Raises as `format.encode`."""
        return object_format.encode(record, created, mac=self.mac, digest=self.digest)

    def open(self, source: Source, name: str, where: str) -> Opened:
        """The object ``name`` in ``source``, to be read group by group.

        ``where`` names it in errors. Raises as `format.decode`, and `OSError`.
        """
        return self._named(object_format.open_object(source, name, where, self.mac, self.name), name)

    def decode(self, data: bytes, name: str, source: str) -> Record:
        """The record in ``data``, which must be the object ``name``. Raises as `format.decode`."""
        return self.open(BytesSource(data), name, source).read()

    def read_header(self, file: BinaryIO, size: int, name: str, source: str) -> Header:
        """The verified header of a file of ``size`` bytes; no tensor is read. Raises as `format.decode`."""
        return object_format.read_header(file, size, name, source, self.mac, self.name)

    def read_info(self, file: BinaryIO, size: int, name: str, source: str) -> ObjectInfo:
        """What `read_header` says, under the object's name."""
        return replace(info_of(self.read_header(file, size, name, source), size), key=name)

    def describe(self, record: Record, created: float, size: int) -> ObjectInfo:
        """The info that `read_info` returns for the file of ``record``."""
        return replace(info_of(written(record, created, {}), size), key=self.name(record.key))

    @property
    def mac(self) -> bytes:
        """The key of the headers' digests; without one anybody can make them."""
        return b""

    @property
    def marker(self) -> dict[str, Any]:
        """The content of `kamera-store.json` in a directory of such objects."""
        return {"format": DIRECTORY_VERSION, "layout": LAYOUT}

    def sign(self, text: str) -> str:
        """A digest of a text, by which one that was not written here is detected."""
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def veil(self, text: str) -> str:
        """The form of an id in the index; equal ids have equal forms, so that the index can search them."""
        return text

    def unveil(self, text: str) -> str:
        """The inverse of `veil`."""
        return text

    def _named(self, opened: Opened, name: str) -> Opened:
        return replace(opened, head=replace(opened.head, info=replace(opened.head.info, key=name)))
