"""The hashes that may verify an object's groups of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal, Protocol, get_args

from kamera.errors import StoreError, quote

DigestName = Literal["sha256", "blake3"]
DIGESTS: tuple[DigestName, ...] = get_args(DigestName)


class Hasher(Protocol):
    """A hash in progress; ``update`` lets other threads run meanwhile."""

    def update(self, data: memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


def hasher_of(name: str) -> Callable[[], Hasher]:
    """The constructor of the 256-bit hash ``name``.

    Raises `ValueError` for a name that is not in `DIGESTS`, `StoreError` for a hash whose package is missing.
    """
    if name == "sha256":
        return hashlib.sha256
    if name == "blake3":
        try:
            from blake3 import blake3
        except ImportError:
            raise StoreError('blake3 digests need a package: pip install "kamera-kv[blake3]"') from None
        return blake3
    raise ValueError(f"digest {quote(name)} is none of {', '.join(DIGESTS)}")
