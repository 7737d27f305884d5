"""Objects encrypted at rest, in frames; keys of before can still read.

AES-256-GCM of the `cryptography` package; `docs/stores.md` specifies the file. The plaintext is
the sealed file of `seal.Sealed`, so nothing else about reading it changes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kamera.errors import CorruptChunk, StoreError, StoreVersionError, WrongKey
from kamera.store.head import DIGEST, front_size, read_head
from kamera.store.records import Record
from kamera.store.seal.codec import ENCRYPTED, Sealed, root_key
from kamera.store.sources import ByteSource

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    from kamera.store.seal.frames import LENGTH, SALT, Cipher, Plaintext, Preamble
except ImportError as error:
    raise StoreError('encryption needs a package: pip install "kamera-kv[encryption]"') from error

KEY_BYTES = 32


@dataclass(frozen=True)
class Encrypted(Sealed):
    """Objects encrypted under the first of ``keys`` (by id), read under any; see `Encrypted.under`."""

    keys: dict[bytes, bytes] = field(repr=False)

    @classmethod
    def under(cls, tenant: str, secret: bytes | str, keys: Sequence[bytes]) -> Encrypted:
        """The codec of ``tenant``. Raises `ValueError` unless ``keys`` are one or more distinct 32 bytes."""
        if not keys or any(not isinstance(key, bytes) or len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"keys must be {KEY_BYTES} bytes each, the one to write with first")
        if len(set(keys)) < len(keys):
            raise ValueError("keys must differ")
        root = root_key(tenant, secret)
        derived_keys = [_derive(key, root) for key in keys]
        return cls(root, {_key_id(key): key for key in derived_keys})

    def encode(self, record: Record, created: float) -> bytes:
        """The encrypted file. Raises as the sealed codec."""
        name, plain = self.name(record.key), memoryview(super().encode(record, created))
        key_id, key = next(iter(self.keys.items()))
        head = front_size(bytes(plain[: DIGEST.stop]), len(plain), name)
        preamble = Preamble(ENCRYPTED, key_id, os.urandom(SALT), head, len(plain))
        preamble = preamble._replace(check=self._check(preamble.without_check, name))
        cipher = Cipher(key, preamble, name)
        frames = (cipher.encrypt(i, plain[slice(*preamble.span(i))]) for i in preamble.frames(0, len(plain)))
        return b"".join([preamble.raw, *frames])

    def _plain(self, source: ByteSource, name: str, where: str) -> ByteSource:
        """See `Codec`; `WrongKey` for an intact object whose key is not among those given."""
        first = source.read(0, LENGTH)
        if first[:7] != ENCRYPTED[:7]:
            # reports the fault, unless the secret's holder wrote it
            read_head(self._front(source, where), source.size, where, self.mac_key)
            raise WrongKey(f"{where}: it was written without encryption: copy it from a store without keys=")
        preamble = self._preamble(first, source.size, name, where)
        cipher = Cipher(self.keys[preamble.key_id], preamble, name)
        return Plaintext(source, cipher, preamble, where)

    @property
    def marker(self) -> dict[str, Any]:
        """Marks the directory: everything written here must be encrypted."""
        return {**super().marker, "sealed": "encrypted"}

    def seal_id(self, text: str) -> str:
        """``text`` encrypted deterministically (AES-SIV): equal texts have equal ciphertexts."""
        return self._siv.encrypt(text.encode(), None).hex()

    def open_id(self, text: str) -> str:
        """The inverse of `seal_id`; raises `ValueError` for a text that `seal_id` did not make."""
        try:
            return self._siv.decrypt(bytes.fromhex(text), None).decode()
        except InvalidTag:
            raise ValueError("an id in the index was not written under this secret") from None

    @property
    def _siv(self) -> AESSIV:
        return AESSIV(self.key_for("kamera.veil.v1", 64))

    def _preamble(self, first: bytes, total: int, name: str, source: str) -> Preamble:
        """The preamble of a file that begins with ``first``; its check has passed and its key is known."""
        if len(first) < LENGTH:
            raise CorruptChunk(f"{source}: truncated, {total} bytes are no encrypted object")
        preamble = Preamble.of(first)
        if not hmac.compare_digest(preamble.check, self._check(preamble.without_check, name)):
            raise CorruptChunk(f"{source}: the first bytes have changed, or were written without the secret")
        if preamble.magic != ENCRYPTED:
            raise StoreVersionError(f"{source}: it was encrypted in another format: write it anew")
        if preamble.key_id not in self.keys:
            ids = ", ".join(key_id.hex()[:8] for key_id in self.keys)
            raise WrongKey(
                f"{source}: encrypted under key {preamble.key_id.hex()[:8]}, given were {ids}: add the key "
                "it was written with to keys="
            )
        if preamble.total != total:
            raise CorruptChunk(f"{source}: {total} bytes, of {preamble.total}")
        return preamble

    def _check(self, start: bytes, name: str) -> bytes:
        key = self.key_for("kamera.preamble.v1")
        return hashlib.blake2b(name.encode() + start, key=key, digest_size=32).digest()


def _derive(key: bytes, root: bytes) -> bytes:
    """The AES key of one tenant: the same ``key`` given to two tenants gives two AES keys."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=root, info=b"kamera.encryption.v1").derive(key)


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(b"kamera.key-id.v1", key=key, digest_size=16).digest()
