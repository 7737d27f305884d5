"""The first bytes of an encrypted object: its key's id, salt and lengths."""

from __future__ import annotations

from typing import NamedTuple

from kamera.store.seal.codec import ENCRYPTED

CHECK = 32
"""Bytes of the keyed digest that ends a preamble."""

SALT = 32
LENGTH = 8 + 16 + SALT + 8 + 8 + CHECK
"""Bytes of a preamble."""

_CUT = 24 + SALT


class Preamble(NamedTuple):
    """``salt`` was drawn for this file; ``head`` bytes of ciphertext follow (their tag included), of
    ``total`` in the file."""

    raw: bytes
    key_id: bytes
    salt: bytes
    head: int
    total: int

    @property
    def checked(self) -> bytes:
        """The preamble without its check."""
        return self.raw[:-CHECK]

    @property
    def check(self) -> bytes:
        """The check: valid if it is the keyed digest of the object's name and of `checked`."""
        return self.raw[-CHECK:]


def is_encrypted(first: bytes) -> bool:
    """True if a file that begins with ``first`` holds a whole preamble."""
    return first[:8] == ENCRYPTED and len(first) >= LENGTH


def started(key_id: bytes, salt: bytes, head: int, total: int) -> bytes:
    """A preamble without its check."""
    return ENCRYPTED + key_id + salt + head.to_bytes(8, "little") + total.to_bytes(8, "little")


def parsed(raw: bytes) -> Preamble:
    """The preamble ``raw``, of `LENGTH` bytes; nothing in it is verified yet."""
    return Preamble(
        raw=raw,
        key_id=raw[8:24],
        salt=raw[24:_CUT],
        head=int.from_bytes(raw[_CUT : _CUT + 8], "little"),
        total=int.from_bytes(raw[_CUT + 8 : -CHECK], "little"),
    )
