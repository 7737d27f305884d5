"""One safetensors file per object: a header under one digest, which holds the digests of the tensors.

The file is written here and not by the library, because the digest must be at a fixed place: then it
is verified before anything in the file is parsed. `docs/store-format.md` specifies the file; any
safetensors reader reads it. Pickle is never used.
"""

from __future__ import annotations

from typing import BinaryIO

from kamera.errors import CorruptChunk
from kamera.ops import tensor_bytes
from kamera.store.digests import DigestName, hasher_of
from kamera.store.fields import Header
from kamera.store.groups import grouped, laid_out
from kamera.store.head import (
    DIGEST,
    FORMAT_VERSION,
    Naming,
    front_size,
    signed,
    text_of,
    trusted,
    verified,
    written,
)
from kamera.store.opened import Opened, Plain
from kamera.store.records import Record
from kamera.store.sources import BytesSource, Source

__all__ = [
    "DIRECTORY_VERSION",
    "FORMAT_VERSION",
    "LAYOUT",
    "Naming",
    "decode",
    "encode",
    "open_object",
    "read_header",
]

DIRECTORY_VERSION = 3
"""The format in `kamera-store.json`; a directory of any other raises `StoreVersionError`."""

LAYOUT = "blocks"
"""What a directory's objects hold of equal layers, in `kamera-store.json`: one tensor for all of them."""

_FRONT = 64 * 1024  # bytes; the header of most objects is within


def encode(record: Record, created: float, mac: bytes = b"", digest: DigestName = "sha256") -> bytes:
    """The file of ``record``, whose bytes depend on the four arguments alone (``created`` in seconds).

    ``mac`` (up to 64 bytes) keys the header's digest: a file written without it fails verification.
    ``digest`` is the hash of the tensors. Tensors may be on any device, strided, or share memory. Raises
    `ValueError` for a record that the format cannot hold (a dtype without a safetensors name, info that is
    not JSON), `StoreError` for a hash whose package is missing.
    """
    begin = hasher_of(digest)
    tensors = record.tensors()
    entries = laid_out(tensors)
    parts = {name: tensor_bytes(tensors[name]) for name in entries}
    digests: dict[str, str] = {}
    for group in grouped(entries).values():
        hasher = begin()
        for name in group.tensors:
            hasher.update(parts[name])
        digests[group.name] = hasher.hexdigest()
    header = written(record, created, {"algorithm": digest, "groups": digests})
    return b"".join([signed(text_of(header, entries), mac), *parts.values()])


def open_object(source: Source, expected: str, where: str, mac: bytes = b"", name: Naming = str) -> Opened:
    """The object in ``source``, its header verified and no tensor read. Raises as `decode`, and `OSError`."""
    front = source.read(0, _FRONT)
    size = front_size(front, source.size, where)
    if size > len(front):
        front += source.read(len(front), size - len(front))
    if len(front) < size:
        raise CorruptChunk(f"{where}: truncated, the header ends at byte {len(front)} of {size}")
    head = verified(front[:size], source.size, expected, where, mac, name)
    if size + head.size != source.size:
        raise CorruptChunk(f"{where}: {source.size} bytes, its header tells of {size + head.size}")
    return Opened(head, Plain(source, size))


def decode(data: bytes, expected: str, source: str, mac: bytes = b"", name: Naming = str) -> Record:
    """The record in ``data``, for whose key ``name`` returns ``expected``.

    ``source`` names the bytes in errors; ``mac`` is the one given to `encode`. Raises `CorruptChunk` for
    anything that `encode` did not write for that key, and `StoreVersionError` for an intact object of
    another format, or under a hash that is not installed.
    """
    return open_object(BytesSource(data), expected, source, mac, name).read()


def read_header(
    file: BinaryIO, size: int, expected: str, source: str, mac: bytes = b"", name: Naming = str
) -> Header:
    """The header of an object file of ``size`` bytes, its digest verified first.

    No tensor is read: good for listing, never for serving. Raises as `decode`.
    """
    first = file.read(DIGEST.stop)
    length = front_size(first, size, source)
    front = first + file.read(length - len(first))
    if len(front) < length:
        raise CorruptChunk(f"{source}: truncated, the header ends at byte {len(front)} of {length}")
    return trusted(front, expected, source, mac, name)
