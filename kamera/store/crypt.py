"""Sealed and encrypted objects: only who holds a tenant's secret can name, write or read them.

Sealed: names and header digests are keyed, so nobody else can compute an object's name, and so request it, or
write a file that this tenant would accept as its own. Encrypted: the bytes of the sealed file in frames of
AES-256-GCM, each decrypted by itself; keys of before can still read. `docs/stores.md` gives the threat model
and the file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kamera.errors import CorruptChunk, StoreError, StoreVersionError, WrongKey
from kamera.store.format import DIGEST, Codec, Source, front_size, read_bytes
from kamera.store.records import Record

MINIMUM_SECRET = 16
"""Bytes. A secret is not stretched as a password would be: use `secrets.token_bytes(32)`."""
KEY_BYTES = 32
ENCRYPTED = b"KAMERA\x00\x04"
"""First bytes of encrypted objects; no safetensors header may be that long."""
SEALED_VERSION = 10
"""Format in `kamera-store.json` of a sealed store: a plain one is never taken for it."""
FRAME = 256 * 2**10
"""Bytes of tensors in a frame; the first frame is the header, which is all that a listing reads."""
TAG = 16
SALT = 32
# magic, id of the key, salt of the file, bytes of the plain header, of the plain object; then their check
_PREAMBLE = struct.Struct(f"<8s16s{SALT}sQQ")
_START = _PREAMBLE.size + 32


def codec_of(tenant: str, secret: bytes | str | None, keys: Sequence[bytes]) -> Codec:
    """The codec of ``tenant``'s objects: plain, with a ``secret`` sealed, with ``keys`` encrypted, too.

    Raises `ValueError` for a secret under 16 bytes, or keys that are not distinct and of 32 bytes.
    """
    if secret is None:
        if keys:
            raise ValueError("keys encrypt what a secret names: give secret= as well")
        return Codec()
    data = secret.encode() if isinstance(secret, str) else secret
    if not isinstance(data, bytes) or len(data) < MINIMUM_SECRET:
        # the message omits the value: it would be the secret
        raise ValueError(
            f"secret must be at least {MINIMUM_SECRET} bytes nobody guesses: take secrets.token_bytes(32)"
        )
    extracted = hashlib.blake2b(data, digest_size=64, person=b"kamera-secret").digest()
    root = hashlib.blake2b(tenant.encode(), key=extracted, digest_size=32, person=b"kamera-tenant").digest()
    if not keys:
        return Sealed(root)
    if any(not isinstance(key, bytes) or len(key) != KEY_BYTES for key in keys):
        raise ValueError(f"keys must be {KEY_BYTES} bytes each, the one to write with first")
    if len(set(keys)) < len(keys):
        raise ValueError("keys must differ")
    own = [_derive(key, root, b"kamera.encryption.v1") for key in keys]
    ids = [hashlib.blake2b(b"kamera.key-id.v1", key=key, digest_size=16).digest() for key in own]
    return Sealed(root, dict(zip(ids, own, strict=True)))


@dataclass(frozen=True)
class Sealed(Codec):
    """Objects of one tenant: names and digests are keyed by its secret, from which ``root`` follows.

    With ``keys`` (by id) they are encrypted, under the first, and read under any; see `codec_of`.
    """

    root: bytes = field(repr=False)
    keys: dict[bytes, bytes] = field(default_factory=dict, repr=False)

    def key_for(self, purpose: str, size: int = 32) -> bytes:
        """A key of ``size`` bytes (up to 64) for one purpose only; it reveals nothing about the others."""
        return hashlib.blake2b(purpose.encode(), key=self.root, digest_size=size).digest()

    def name(self, key: str) -> str:
        """The keyed digest of ``key``."""
        return hashlib.blake2b(key.encode(), key=self.key_for("kamera.name.v1"), digest_size=32).hexdigest()

    def sign(self, text: str) -> str:
        """See `Codec`; nobody can make one without the secret."""
        return hashlib.blake2b(text.encode(), key=self.key_for("kamera.sign.v1"), digest_size=16).hexdigest()

    @property
    def folder(self) -> str:
        """The name of the tenant's directory."""
        return self.key_for("kamera.folder.v1").hex()

    @property
    def marker(self) -> dict[str, Any]:
        """Marks the directory: it is not opened as a plain one, nor without keys if it has any."""
        return {"format": SEALED_VERSION, "sealed": "encrypted" if self.keys else "digests"}

    @property
    def mac_key(self) -> bytes:
        """Known to the holder of the secret alone."""
        return self.key_for("kamera.digest.v1", 64)

    def parts(self, record: Record, created: float) -> list[bytes | memoryview]:
        """The bytes of the file, encrypted if there are keys. Raises as the plain codec."""
        name, parts = self.name(record.key), super().parts(record, created)
        if not self.keys:
            return parts
        plain = b"".join(parts)
        key_id, key = next(iter(self.keys.items()))
        head = front_size(plain[: DIGEST.stop], len(plain), name)
        start = _PREAMBLE.pack(ENCRYPTED, key_id, os.urandom(SALT), head, len(plain))
        start += self._check(start, name)
        frames = Frames(key, start, name)
        return [start, *frames.encrypted(memoryview(plain))]

    def seal_id(self, text: str) -> str:
        """With keys ``text`` encrypted deterministically (AES-SIV): equal texts have equal ciphertexts."""
        return text if not self.keys else bytes(self._siv().encrypt(text.encode(), None)).hex()

    def open_id(self, text: str) -> str:
        """The inverse of `seal_id`; raises `ValueError` for a text that `seal_id` did not make."""
        if not self.keys:
            return text
        from cryptography.exceptions import InvalidTag

        try:
            return bytes(self._siv().decrypt(bytes.fromhex(text), None)).decode()
        except InvalidTag:
            raise ValueError("a text in the index was not written under this secret") from None

    def _siv(self) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV

        return AESSIV(self.key_for("kamera.veil.v1", 64))

    def _plain(self, source: Source, name: str, where: str) -> Source:
        """See `Codec`; `WrongKey` for an intact object whose key is not among those given."""
        start = read_bytes(source, 0, _START if self.keys else len(ENCRYPTED))
        if start[:7] != ENCRYPTED[:7]:
            if not self.keys:
                return source
            # reports the fault, unless the secret's holder wrote it
            Sealed(self.root).read_header(source, name, where)
            raise WrongKey(f"{where}: it was written without encryption: copy it from a store without keys=")
        if not self.keys:
            raise WrongKey(f"{where}: it is encrypted: open the store with keys=")
        if len(start) < _START:
            raise CorruptChunk(f"{where}: truncated, {source.size} bytes are no encrypted object")
        fields, check = start[:-32], start[-32:]
        if not hmac.compare_digest(check, self._check(fields, name)):
            raise CorruptChunk(f"{where}: the first bytes have changed, or were written without the secret")
        magic, key_id, *_ = _PREAMBLE.unpack(fields)
        if magic != ENCRYPTED:
            raise StoreVersionError(f"{where}: it was encrypted in another format: write it anew")
        if key_id not in self.keys:
            ids = ", ".join(known.hex()[:8] for known in self.keys)
            raise WrongKey(
                f"{where}: encrypted under key {key_id.hex()[:8]}, given were {ids}: add the key it was "
                "written with to keys="
            )
        frames = Frames(self.keys[key_id], start, name, source, where)
        if frames.total != source.size:
            raise CorruptChunk(f"{where}: {source.size} bytes, of {frames.total}")
        return Source(frames.size, frames.read_into)

    def _check(self, fields: bytes, name: str) -> bytes:
        key = self.key_for("kamera.preamble.v1")
        return hashlib.blake2b(name.encode() + fields, key=key, digest_size=32).digest()


class Frames:
    """The plain object ``name`` in an encrypted one, which begins with ``start`` and is read from ``source``.

    The first frame is the header, then come its tensors. Every file has its own key, derived from the
    tenant's with a random salt, so the nonces may simply count the frames. A frame's number, the object's
    name and ``start``, which holds the plain length, are authenticated with it: frames cannot be swapped,
    dropped or taken from another file.
    """

    def __init__(
        self, key: bytes, start: bytes, name: str, source: Source | None = None, where: str = ""
    ) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        *_, salt, self._head, self.size = _PREAMBLE.unpack(start[:-32])
        self._gcm = AESGCM(_derive(key, salt, b"kamera.object.v1"))
        self._binding = start + name.encode()
        self._source = source
        self._where = where

    @property
    def total(self) -> int:
        """The bytes of the whole file."""
        return _START + self.size + TAG * len(self._numbers(0, self.size))

    def encrypted(self, plain: memoryview) -> list[bytes]:
        """The frames of ``plain``, each with its tag; to be called once."""
        numbers = self._numbers(0, len(plain))
        return [self._gcm.encrypt(*self._bound(i, plain[slice(*self._span(i))])) for i in numbers]

    def read_into(self, start: int, view: memoryview) -> None:
        end = start + len(view)
        if end > self.size or self._source is None:
            raise EOFError(f"{self.size} bytes end before {end}")
        from cryptography.exceptions import InvalidTag

        for number in self._numbers(start, end) if len(view) else ():
            first, last = self._span(number)
            frame = read_bytes(self._source, _START + first + TAG * number, last - first + TAG)
            try:
                plain = self._gcm.decrypt(*self._bound(number, frame))
            except InvalidTag:
                raise CorruptChunk(
                    f"{self._where}: its frame {number} cannot be decrypted, bytes have changed"
                ) from None
            begin, stop = max(first, start), min(last, end)
            view[begin - start : stop - start] = plain[begin - first : stop - first]

    def _bound(self, number: int, data: bytes | memoryview) -> tuple[bytes, bytes | memoryview, bytes]:
        """Nonce, data and what is authenticated with a frame."""
        return number.to_bytes(12, "big"), data, self._binding + number.to_bytes(8, "little")

    def _numbers(self, start: int, end: int) -> range:
        """The frames that hold the bytes from ``start`` to ``end`` of the plain object."""
        head = self._head
        first, last = (0 if at < head else 1 + (at - head) // FRAME for at in (start, end - 1))
        return range(first, last + 1)

    def _span(self, number: int) -> tuple[int, int]:
        """Where a frame begins and ends in the plain object."""
        start = self._head + (number - 1) * FRAME if number else 0
        return start, min(start + FRAME, self.size) if number else self._head


def _derive(key: bytes, salt: bytes, purpose: bytes) -> bytes:
    """A key of ``key`` for one purpose; another ``salt`` gives another key."""
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise StoreError('encryption needs a package: pip install "kamera-kv[encryption]"') from error
    return bytes(HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=purpose).derive(key))
