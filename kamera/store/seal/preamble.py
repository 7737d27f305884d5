"""The first bytes of an encrypted object: under which key it is, and how it is cut."""

from __future__ import annotations

from typing import NamedTuple

from kamera.store.seal.codec import ENCRYPTED

CHECK = 32
"""Bytes of the keyed digest that ends a preamble."""

SHORTEST = 88
"""Bytes of the shortest preamble there is, that of version 1."""

_FRESH = {1: 24, 2: 32}  # bytes that were drawn for this file: two nonces, or a salt


class Preamble(NamedTuple):
    """``fresh`` was drawn for this file; ``head`` bytes of ciphertext follow (their tag included), of
    ``total`` in the file, which version 1 does not say (0)."""

    raw: bytes
    version: int
    key_id: bytes
    fresh: bytes
    head: int
    total: int

    @property
    def checked(self) -> bytes:
        """All but its check."""
        return self.raw[:-CHECK]

    @property
    def check(self) -> bytes:
        """What must be the keyed digest of the object's name and of `checked`."""
        return self.raw[-CHECK:]


def version_of(first: bytes) -> int | None:
    """Version of an encrypted object that begins with ``first``; None if it is none."""
    return ENCRYPTED.index(first[:8]) + 1 if first[:8] in ENCRYPTED else None


def length_of(version: int) -> int:
    """Bytes of a preamble."""
    return 8 + 16 + _FRESH[version] + (8 if version == 1 else 16) + CHECK


def started(version: int, key_id: bytes, fresh: bytes, head: int, total: int) -> bytes:
    """A preamble but for its check."""
    sizes = (head,) if version == 1 else (head, total)
    numbers = b"".join(size.to_bytes(8, "little") for size in sizes)
    return ENCRYPTED[version - 1] + key_id + fresh + numbers


def parsed(raw: bytes, version: int) -> Preamble:
    """The preamble ``raw``, which has its length; nothing in it is believed yet."""
    cut = 24 + _FRESH[version]
    numbers = raw[cut:-CHECK]
    return Preamble(
        raw=raw,
        version=version,
        key_id=raw[8:24],
        fresh=raw[24:cut],
        head=int.from_bytes(numbers[:8], "little"),
        total=int.from_bytes(numbers[8:], "little"),
    )
