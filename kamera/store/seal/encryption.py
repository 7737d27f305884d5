"""Objects encrypted at rest, header and groups of tensors separately; keys of before can still read.

AES-256-GCM of the `cryptography` package; `docs/store-format.md` specifies the file. The plaintext is
the sealed file of `seal.Sealed`, so nothing else about reading it changes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kamera.errors import CorruptChunk, StoreError, WrongKey
from kamera.store.head import MAX_HEADER, front_size, verified
from kamera.store.opened import OpenObject
from kamera.store.records import Record
from kamera.store.seal.codec import ENCRYPTED, Sealed, root_key
from kamera.store.seal.preamble import LENGTH, SALT, Preamble
from kamera.store.sources import ByteSource, BytesSource

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    from kamera.store.seal.frames import TAG, Cipher, Frames, cuts
except ImportError as error:
    raise StoreError('encryption needs the cryptography package: pip install "kamera[encryption]"') from error

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
        derived = [_derive(key, root) for key in keys]
        return cls(root, {_key_id(key): key for key in derived})

    def encode(self, record: Record, created: float) -> bytes:
        """The encrypted file. Raises as the sealed codec."""
        name = self.name(record.key)
        return self._encrypt(super().encode(record, created), name)

    def _front(self, source: ByteSource, name: str, where: str) -> bytes:
        """As sealed; only the header is read and decrypted."""
        return self._unlock(source, name, where)[0]

    def open(self, source: ByteSource, name: str, where: str) -> OpenObject:
        """As sealed; `WrongKey` for an intact object whose key is not among those given."""
        front, preamble, cipher = self._unlock(source, name, where)
        head = verified(front, source.size, where, self.mac)
        payload = Frames(source, cipher, preamble, head.groups, where)
        return OpenObject(self._named(head, name), payload)

    @property
    def marker(self) -> dict[str, Any]:
        """Marks the directory: everything written here must be encrypted."""
        return {**super().marker, "sealed": "encrypted"}

    def veil(self, text: str) -> str:
        """``text`` encrypted deterministically (AES-SIV): equal texts have equal ciphertexts."""
        return self._siv.encrypt(text.encode(), None).hex()

    def unveil(self, text: str) -> str:
        """The inverse of `veil`; raises `ValueError` for a text that `veil` did not make."""
        try:
            return self._siv.decrypt(bytes.fromhex(text), None).decode()
        except InvalidTag:
            raise ValueError("an id in the index was not written under this secret") from None

    @property
    def _siv(self) -> AESSIV:
        return AESSIV(self.key_for("kamera.veil.v1", 64))

    def _encrypt(self, plain: bytes, name: str) -> bytes:
        front = super()._front(BytesSource(plain), name, name)
        groups, cut = verified(front, len(plain), name, self.mac).groups, len(front)
        key_id, key = next(iter(self.keys.items()))
        total = LENGTH + len(plain) + TAG * (1 + sum(len(cuts(group.size)) for group in groups.values()))
        preamble = Preamble(ENCRYPTED, key_id, os.urandom(SALT), cut + TAG, total)
        preamble = preamble._replace(check=self._check(preamble.checked, name))
        cipher = Cipher(key, preamble, name)
        tensors = memoryview(plain)[cut:]
        frames = [cipher.encrypt(0, plain[:cut])]
        for group in groups.values():
            held = b"".join(tensors[first:last] for first, last in group.spans)
            for first, last in cuts(group.size):
                frames.append(cipher.encrypt(len(frames), held[first:last]))
        return b"".join([preamble.raw, *frames])

    def _unlock(self, source: ByteSource, name: str, where: str) -> tuple[bytes, Preamble, Cipher]:
        first = source.read(0, LENGTH)
        if first[:8] != ENCRYPTED:
            # reports the fault, unless the secret's holder wrote it
            verified(super()._front(source, name, where), source.size, where, self.mac)
            raise WrongKey(f"{where}: it was written without encryption: copy it from a store without keys=")
        preamble = self._preamble(first, source.size, name, where)
        cipher = Cipher(self.keys[preamble.key_id], preamble, name)
        front = cipher.decrypt(0, "head", source.read(LENGTH, preamble.head), where)
        if front_size(front, len(front), where) != len(front):
            raise CorruptChunk(f"{where}: its head is not that of an encrypted object")
        return front, preamble, cipher

    def _preamble(self, first: bytes, total: int, name: str, source: str) -> Preamble:
        """The preamble of a file that begins with ``first``; its check has passed and its key is known."""
        if len(first) < LENGTH:
            raise CorruptChunk(f"{source}: truncated, {total} bytes are no encrypted object")
        preamble = Preamble.of(first)
        if not hmac.compare_digest(preamble.check, self._check(preamble.checked, name)):
            raise CorruptChunk(f"{source}: the first bytes have changed, or were written without the secret")
        if preamble.key_id not in self.keys:
            known = ", ".join(key_id.hex()[:8] for key_id in self.keys)
            raise WrongKey(
                f"{source}: encrypted under key {preamble.key_id.hex()[:8]}, given were {known}: add the key "
                "it was written with to keys="
            )
        if preamble.total != total:
            raise CorruptChunk(f"{source}: {total} bytes, of {preamble.total}")
        if not TAG < preamble.head <= min(total - LENGTH, TAG + 8 + MAX_HEADER):
            raise CorruptChunk(f"{source}: impossible header length {preamble.head} in {total} bytes")
        return preamble

    def _check(self, start: bytes, name: str) -> bytes:
        key = self.key_for("kamera.preamble.v1")
        return hashlib.blake2b(name.encode() + start, key=key, digest_size=32).digest()


def _derive(key: bytes, root: bytes) -> bytes:
    """The AES key of one tenant: the same ``key`` given to two tenants gives two AES keys."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=root, info=b"kamera.encryption.v1").derive(key)


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(b"kamera.key-id.v1", key=key, digest_size=16).digest()
