"""The first bytes of an encrypted object: its key's id, salt and lengths."""

from __future__ import annotations

import struct
from typing import NamedTuple

SALT = 32
_LAYOUT = struct.Struct(f"<8s16s{SALT}sQQ32s")
LENGTH = _LAYOUT.size
"""Bytes of a preamble."""


class Preamble(NamedTuple):
    """``salt`` was drawn for this file; ``head`` bytes of ciphertext follow (their tag included), of
    ``total`` in the file. It is valid if ``check`` is the keyed digest of the object's name and of `checked`.
    """

    magic: bytes
    key_id: bytes
    salt: bytes
    head: int
    total: int
    check: bytes = b""

    @property
    def raw(self) -> bytes:
        """The bytes in the file."""
        return _LAYOUT.pack(*self)

    @property
    def checked(self) -> bytes:
        """The preamble without its check."""
        return self.raw[:-32]

    @classmethod
    def of(cls, raw: bytes) -> Preamble:
        """The preamble ``raw``, of `LENGTH` bytes; nothing in it is verified yet."""
        return cls(*_LAYOUT.unpack(raw))
