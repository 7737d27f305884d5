"""Codec between the objects of one store and their files: names, bytes and headers.

A file is a safetensors file whose header has a digest, which holds the digests of the tensors. It is written
here and not by the library, because the digest must be at a fixed place: then it is verified before anything
in the file is parsed. `docs/stores.md` specifies the file; any safetensors reader reads it. Pickle is
never used.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from kamera.errors import CorruptChunk, StoreVersionError, WrongKey
from kamera.ops import tensor_bytes
from kamera.store.digests import DigestName, hasher_of
from kamera.store.entries import file_entries, piece_digests
from kamera.store.fields import Header
from kamera.store.head import (
    DIGEST,
    front_of,
    front_size,
    header_of,
    info_of,
    read_head,
    text_of,
    verify_header,
)
from kamera.store.info import ObjectInfo
from kamera.store.opened import OpenObject
from kamera.store.records import Record
from kamera.store.sources import ByteSource, BytesSource

DIRECTORY_VERSION = 7
"""The format in `kamera-store.json`; a directory of any other raises `StoreVersionError`."""

UNREADABLE = (CorruptChunk, StoreVersionError, WrongKey)
"""Errors of an object that is there and is not this one, or not readable here."""


@dataclass(frozen=True)
class Codec:
    """The plain codec: the name of an object is its key. Tiers know objects by name, and bytes by a codec."""

    digest: DigestName = field(default="sha256", kw_only=True)

    def name(self, key: str) -> str:
        """The name of the object under ``key`` in every tier: 64 lower-case hex digits."""
        return key

    def encode(self, record: Record, created: float) -> bytes:
        """The file of ``record``, whose bytes depend on the codec and the arguments alone (``created`` in s).

        Tensors may be on any device, strided, or share memory. Raises `ValueError` for a record that the
        format cannot hold (a dtype without a safetensors name, info that is not JSON), `StoreError` for a
        hash whose package is missing.
        """
        begin = hasher_of(self.digest)
        tensors = record.tensors()
        entries = file_entries(tensors)
        parts = {name: tensor_bytes(tensors[name]) for name in entries}
        pieces = piece_digests(parts.values(), begin)
        header = header_of(record, created, {"algorithm": self.digest, "pieces": pieces})
        return b"".join([front_of(text_of(header, entries), self.mac_key), *parts.values()])

    def _plain(self, source: ByteSource, name: str, where: str) -> ByteSource:
        """The object ``name`` as it was before it was encrypted. Raises as `open`, and when it is read."""
        return source

    def _front(self, source: ByteSource, where: str) -> bytes:
        """The length and the header of a plain object, unverified. Raises as `open`."""
        first = source.read(0, DIGEST.stop)
        size = front_size(first, source.size, where)
        front = first + source.read(len(first), size - len(first))
        if len(front) < size:
            raise CorruptChunk(f"{where}: truncated, the header ends at byte {len(front)} of {size}")
        return front

    def open(self, source: ByteSource, name: str, where: str) -> OpenObject:
        """The object ``name`` in ``source``, to be read piece by piece: its header verified, no tensor read.

        ``where`` names it in errors. Raises as `decode`, and `OSError`.
        """
        plain = self._plain(source, name, where)
        front = self._front(plain, where)
        head = read_head(front, source.size, where, self.mac_key)
        if len(front) + head.size != plain.size:
            expected_size = len(front) + head.size
            raise CorruptChunk(f"{where}: {plain.size} bytes, its header tells of {expected_size}")
        self._check_name(head.info.key, name, where)
        return OpenObject(replace(head, info=replace(head.info, key=name)), plain, len(front))

    def decode(self, data: bytes, name: str, source: str) -> Record:
        """The record in ``data``, which must be the object ``name``; ``source`` names the bytes in errors.

        Raises `CorruptChunk` for anything that `encode` did not write for that object, `StoreVersionError`
        for an intact object of another format, or under a hash that is not installed.
        """
        return self.open(BytesSource(data), name, source).read()

    def read_header(self, source: ByteSource, name: str, where: str) -> Header:
        """The verified header of object ``name``: good for listing, never for serving. Raises as `open`."""
        header = verify_header(self._front(self._plain(source, name, where), where), where, self.mac_key)
        self._check_name(header["key"], name, where)
        return header

    def read_info(self, source: ByteSource, name: str, where: str) -> ObjectInfo:
        """What `read_header` says, under the object's name."""
        return replace(info_of(self.read_header(source, name, where), source.size), key=name)

    def describe(self, record: Record, created: float, size: int) -> ObjectInfo:
        """The info that `read_info` returns for the file of ``record``."""
        return replace(info_of(header_of(record, created, {}), size), key=self.name(record.key))

    @property
    def mac_key(self) -> bytes:
        """The key of the headers' digests (up to 64 bytes); without one anybody can make them."""
        return b""

    @property
    def marker(self) -> dict[str, Any]:
        """The content of `kamera-store.json` in a directory of such objects."""
        return {"format": DIRECTORY_VERSION}

    def sign(self, text: str) -> str:
        """A digest of a text, by which one that was not written here is detected."""
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def seal_id(self, text: str) -> str:
        """The form of an id in the index; equal ids have equal forms, so that the index can search them."""
        return text

    def open_id(self, text: str) -> str:
        """The inverse of `seal_id`."""
        return text

    def _check_name(self, key: str, name: str, source: str) -> None:
        if self.name(key) != name:
            raise CorruptChunk(f"{source}: it is of object {self.name(key)}, expected {name}")
