"""Sealed objects: names and digests that only the holder of a tenant's secret can make.

Without the secret nobody can compute an object's name, so nobody can request it; and nobody can write a
file that this tenant would accept as its own. `docs/stores.md` gives the threat model.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from kamera.errors import WrongKey
from kamera.store.codec import Codec
from kamera.store.sources import ByteSource

MINIMUM_SECRET = 16
"""Bytes. A secret is not stretched as a password would be: use `secrets.token_bytes(32)`."""

ENCRYPTED = b"KAMERA\x00\x03"
"""First bytes of encrypted objects; no safetensors header may be that long."""

SEALED_VERSION = 8
"""Format in `kamera-store.json` of a sealed store: a version without seals refuses it."""


@dataclass(frozen=True)
class Sealed(Codec):
    """Objects of one tenant: names and digests are keyed by its secret. Make it with `Sealed.of`."""

    root: bytes = field(repr=False)

    @classmethod
    def of(cls, tenant: str, secret: bytes | str) -> Sealed:
        """The codec of ``tenant``'s objects. Raises `ValueError` for a secret under 16 bytes."""
        return cls(root_key(tenant, secret))

    def key_for(self, purpose: str, size: int = 32) -> bytes:
        """A key of ``size`` bytes (up to 64) for one purpose only; it reveals nothing about the others."""
        return hashlib.blake2b(purpose.encode(), key=self.root, digest_size=size).digest()

    def name(self, key: str) -> str:
        """The keyed digest of ``key``."""
        return hashlib.blake2b(key.encode(), key=self.key_for("kamera.name.v1"), digest_size=32).hexdigest()

    def _plain(self, source: ByteSource, name: str, where: str) -> ByteSource:
        """See `Codec`; `WrongKey` for an encrypted object."""
        if source.read(0, 7) == ENCRYPTED[:7]:
            raise WrongKey(f"{where}: it is encrypted: open the store with keys=")
        return source

    def sign(self, text: str) -> str:
        """See `Codec`; nobody can make one without the secret."""
        return hashlib.blake2b(text.encode(), key=self.key_for("kamera.row.v1"), digest_size=16).hexdigest()

    @property
    def marker(self) -> dict[str, Any]:
        """Marks the directory as sealed, so that it is not opened as a plain one."""
        return {"format": SEALED_VERSION, "sealed": "digests"}

    @property
    def mac_key(self) -> bytes:
        """Known to the holder of the secret alone."""
        return self.key_for("kamera.digest.v1", 64)


def root_key(tenant: str, secret: bytes | str) -> bytes:
    """The root of all keys of a tenant (32 bytes). Raises `ValueError` for a secret under 16 bytes."""
    data = secret.encode() if isinstance(secret, str) else secret
    if not isinstance(data, bytes) or len(data) < MINIMUM_SECRET:
        # the message omits the value: it would be the secret
        raise ValueError(
            f"secret must be at least {MINIMUM_SECRET} bytes nobody guesses: take secrets.token_bytes(32)"
        )
    extracted = hashlib.blake2b(data, digest_size=64, person=b"kamera-secret").digest()
    return hashlib.blake2b(tenant.encode(), key=extracted, digest_size=32, person=b"kamera-tenant").digest()
