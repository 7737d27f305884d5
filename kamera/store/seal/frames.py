"""Frames of an encrypted object: the header of the plain one, then its tensors, each decrypted by itself.

Every file has its own key, derived from the tenant's with a random salt, so the nonces may simply count
the frames. A frame's index, the object's name and the preamble, which holds the plain length, are
authenticated with it: frames cannot be swapped, dropped or taken from another file.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kamera.errors import CorruptChunk
from kamera.store.sources import ByteSource

TAG = 16
SALT = 32
FRAME = 256 * 2**10
"""Bytes of tensors in a frame; the first frame is the header, which is all that a listing reads."""

_LAYOUT = struct.Struct(f"<8s16s{SALT}sQQ32s")
LENGTH = _LAYOUT.size
"""Bytes of a preamble."""


class Preamble(NamedTuple):
    """The first bytes of an encrypted object, whose plain one has ``size`` bytes, ``head`` of them a header.

    ``salt`` was drawn for this file. It is valid if ``check`` is the keyed digest of the object's name and of
    `without_check`.
    """

    magic: bytes
    key_id: bytes
    salt: bytes
    head: int
    size: int
    check: bytes = b""

    @property
    def raw(self) -> bytes:
        """The bytes in the file."""
        return _LAYOUT.pack(*self)

    @property
    def without_check(self) -> bytes:
        """The preamble without its check."""
        return self.raw[:-32]

    @property
    def total(self) -> int:
        """The bytes of the whole file."""
        return LENGTH + self.size + TAG * len(self.frames(0, self.size))

    def frames(self, start: int, end: int) -> range:
        """The frames that hold the bytes from ``start`` to ``end`` of the plain object."""
        first, last = (
            0 if place < self.head else 1 + (place - self.head) // FRAME for place in (start, end - 1)
        )
        return range(first, last + 1)

    def span(self, frame: int) -> tuple[int, int]:
        """Where a frame begins and ends in the plain object."""
        start = self.head + (frame - 1) * FRAME if frame else 0
        return start, min(start + FRAME, self.size) if frame else self.head

    @classmethod
    def of(cls, raw: bytes) -> Preamble:
        """The preamble ``raw``, of `LENGTH` bytes; nothing in it is verified yet."""
        return cls(*_LAYOUT.unpack(raw))


class Cipher:
    """Frames of the object ``name``, whose file begins with ``preamble``."""

    def __init__(self, key: bytes, preamble: Preamble, name: str) -> None:
        hkdf = HKDF(algorithm=SHA256(), length=32, salt=preamble.salt, info=b"kamera.object.v1")
        self._gcm = AESGCM(hkdf.derive(key))
        self._binding = preamble.raw + name.encode()

    def encrypt(self, index: int, data: bytes | memoryview) -> bytes:
        """Frame ``index``, with its tag appended; encrypt each index only once."""
        return self._gcm.encrypt(index.to_bytes(12, "big"), data, self._binding + index.to_bytes(8, "little"))

    def decrypt(self, index: int, data: bytes, source: str) -> bytes:
        """The inverse of `encrypt`. Raises `CorruptChunk`, which names ``source``, for any other bytes."""
        try:
            return self._gcm.decrypt(
                index.to_bytes(12, "big"), data, self._binding + index.to_bytes(8, "little")
            )
        except InvalidTag:
            raise CorruptChunk(
                f"{source}: its frame {index} cannot be decrypted, bytes have changed"
            ) from None


class Plaintext:
    """The plain object in an encrypted one, which begins with ``preamble``; ``where`` names it in errors."""

    def __init__(self, source: ByteSource, cipher: Cipher, preamble: Preamble, where: str) -> None:
        self.size = preamble.size
        self._source = source
        self._cipher = cipher
        self._preamble = preamble
        self._where = where

    def read(self, start: int, length: int) -> bytes:
        data = bytearray(max(0, min(length, self.size - start)))
        self.read_into(start, memoryview(data))
        return bytes(data)

    def read_into(self, start: int, view: memoryview) -> None:
        end = start + len(view)
        if end > self.size:
            raise EOFError(f"{self.size} bytes end before {end}")
        for index in self._preamble.frames(start, end) if len(view) else ():
            first, last = self._preamble.span(index)
            frame = self._source.read(LENGTH + first + TAG * index, last - first + TAG)
            plain = self._cipher.decrypt(index, frame, self._where)
            begin, stop = max(first, start), min(last, end)
            view[begin - start : stop - start] = plain[begin - first : stop - first]
