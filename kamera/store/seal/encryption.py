"""Objects encrypted at rest, header apart from tensors, under keys that can be rotated.

AES-256-GCM of the `cryptography` package, random nonces; `docs/store-format.md` specifies the file.
What is encrypted is the sealed file of `seal.Sealed`, so nothing else about reading it changes.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple

from kamera.errors import CorruptChunk, StoreError, WrongKey
from kamera.store import format as object_format
from kamera.store.info import ObjectInfo
from kamera.store.records import CanonicalRecord, PatchRecord
from kamera.store.seal.codec import ENCRYPTED, SEALED_VERSION, Sealed, root_key

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise StoreError('encryption needs the cryptography package: pip install "kamera[encryption]"') from error

KEY_BYTES = 32
OVERHEAD = 88 + 2 * 16
"""Bytes an encrypted object is larger than the sealed one: preamble and two GCM tags."""

_LIMIT = 2**31 - 1  # of bytes in one call of the library


class _Preamble(NamedTuple):
    raw: bytes  # all 88 bytes
    key_id: bytes
    head_nonce: bytes
    tensors_nonce: bytes
    head_size: int  # of the ciphertext, its tag included


@dataclass(frozen=True)
class Encrypted(Sealed):
    """Objects of one tenant, encrypted under the first of ``keys``; the others are only read with.

    Make it with `Encrypted.under`. ``keys``: AES keys by the id that stands in a file.
    """

    keys: dict[bytes, bytes] = field(repr=False)

    @classmethod
    def under(cls, tenant: str, secret: bytes | str, keys: Sequence[bytes]) -> Encrypted:
        """The objects of ``tenant``. `ValueError` unless ``keys`` are one or more different 32 bytes."""
        if not keys or any(not isinstance(key, bytes) or len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"keys must be {KEY_BYTES} bytes each, the one to write with first")
        if len(set(keys)) < len(keys):
            raise ValueError("keys must differ")
        root = root_key(tenant, secret)
        derived = [_derive(key, root) for key in keys]
        return cls(root, {_key_id(key): key for key in derived})

    def encode(self, record: CanonicalRecord | PatchRecord, created: float) -> bytes:
        """The encrypted file; `ValueError` for an object of 2 GiB or more."""
        return self._encrypt(super().encode(record, created), self.name(record.key))

    def decode(self, data: bytes, name: str, source: str) -> CanonicalRecord | PatchRecord:
        """As sealed; `WrongKey` for an intact object whose key is not among those given."""
        if data[:8] != ENCRYPTED:
            super().decode(data, name, source)  # tells what is wrong with it, unless the secret's holder
            raise WrongKey(f"{source}: it was written without encryption: export it and import it here")
        return super().decode(self._decrypt(data, name, source), name, source)

    def read_info(self, file: BinaryIO, size: int, name: str, source: str) -> ObjectInfo:
        """As sealed; only the header is read and decrypted."""
        preamble = self._preamble(file.read(88), size, name, source)
        head = self._open(preamble, "head", file.read(preamble.head_size), source)
        info = object_format.read_info(io.BytesIO(head), size - OVERHEAD, name, source, self.name)
        return replace(info, key=name, bytes=size)

    def renewed(self, data: bytes, name: str, source: str) -> bytes | None:
        """The file under the first key; None if that is its key already. Raises as `decode`."""
        preamble = self._preamble(bytes(data[:88]), len(data), name, source)
        if preamble.key_id == next(iter(self.keys)):
            return None
        return self._encrypt(self._decrypt(data, name, source), name)

    @property
    def marker(self) -> dict[str, Any]:
        """Says that what is written here must be encrypted."""
        return {"format": SEALED_VERSION, "sealed": "encrypted"}

    def veil(self, text: str) -> str:
        """``text`` encrypted so that the same text is the same every time (AES-SIV)."""
        return self._siv.encrypt(text.encode(), None).hex()

    def unveil(self, text: str) -> str:
        """The inverse of `veil`; `ValueError` for what it did not make."""
        try:
            return self._siv.decrypt(bytes.fromhex(text), None).decode()
        except InvalidTag:
            raise ValueError("an id in the index was not written under this secret") from None

    @property
    def _siv(self) -> AESSIV:
        return AESSIV(self.key_for("kamera.veil.v1", 64))

    def _encrypt(self, plain: bytes, name: str) -> bytes:
        cut = 8 + int.from_bytes(plain[:8], "little")
        if len(plain) - cut > _LIMIT:
            raise ValueError(
                f"an object of {len(plain)} bytes is too large to be encrypted (2 GiB): make smaller chunks"
            )
        key_id, key = next(iter(self.keys.items()))
        start = ENCRYPTED + key_id + os.urandom(12) + os.urandom(12) + (cut + 16).to_bytes(8, "little")
        preamble = _parsed(start + self._check(start, name))
        return b"".join(
            [
                preamble.raw,
                AESGCM(key).encrypt(preamble.head_nonce, plain[:cut], preamble.raw + b"head"),
                AESGCM(key).encrypt(
                    preamble.tensors_nonce, memoryview(plain)[cut:], preamble.raw + b"tensors"
                ),
            ]
        )

    def _decrypt(self, data: bytes, name: str, source: str) -> bytes:
        preamble = self._preamble(bytes(data[:88]), len(data), name, source)
        cut = 88 + preamble.head_size
        head = self._open(preamble, "head", data[88:cut], source)
        return head + self._open(preamble, "tensors", memoryview(data)[cut:], source)

    def _preamble(self, raw: bytes, total: int, name: str, source: str) -> _Preamble:
        """The first 88 bytes of a file, their check passed and their key at hand."""
        if total < OVERHEAD or raw[:8] != ENCRYPTED:
            raise CorruptChunk(f"{source}: no encrypted object")
        preamble = _parsed(raw)
        if not hmac.compare_digest(raw[56:], self._check(raw[:56], name)):
            raise CorruptChunk(f"{source}: the first bytes have changed, or were written without the secret")
        if preamble.key_id not in self.keys:
            known = ", ".join(key_id.hex()[:8] for key_id in self.keys)
            raise WrongKey(
                f"{source}: encrypted under key {preamble.key_id.hex()[:8]}, given were {known}: add the key "
                "it was written with to keys="
            )
        if not 16 < preamble.head_size <= total - 88 - 16:
            raise CorruptChunk(f"{source}: impossible header length {preamble.head_size} in {total} bytes")
        return preamble

    def _open(self, preamble: _Preamble, part: str, data: bytes | memoryview, source: str) -> bytes:
        nonce = preamble.head_nonce if part == "head" else preamble.tensors_nonce
        try:
            return AESGCM(self.keys[preamble.key_id]).decrypt(nonce, data, preamble.raw + part.encode())
        except InvalidTag:
            raise CorruptChunk(f"{source}: its {part} cannot be decrypted, bytes have changed") from None

    def _check(self, start: bytes, name: str) -> bytes:
        key = self.key_for("kamera.preamble.v1")
        return hashlib.blake2b(name.encode() + start, key=key, digest_size=32).digest()


def _parsed(raw: bytes) -> _Preamble:
    return _Preamble(raw, raw[8:24], raw[24:36], raw[36:48], int.from_bytes(raw[48:56], "little"))


def _derive(key: bytes, root: bytes) -> bytes:
    """The AES key of one tenant: the same ``key`` given to two tenants encrypts under two."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=root, info=b"kamera.encryption.v1").derive(key)


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(b"kamera.key-id.v1", key=key, digest_size=16).digest()
