"""Frames of an encrypted object: its head, then its groups of tensors, each decrypted by itself.

Every file has its own key, derived from the tenant's with a random salt, so the nonces may simply count
the frames. A frame's index, the object's name and the preamble, which holds the file's length, are
authenticated with it: frames cannot be swapped, dropped or taken from another file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kamera.errors import CorruptChunk
from kamera.store.groups import Group
from kamera.store.seal.preamble import Preamble
from kamera.store.sources import Source

TAG = 16
LIMIT = 2**31 - 1 - TAG
"""Most bytes of a frame: the limit of one call of the library."""


class Cipher:
    """Frames of the object ``name``, whose file begins with ``preamble``."""

    def __init__(self, key: bytes, preamble: Preamble, name: str) -> None:
        hkdf = HKDF(algorithm=SHA256(), length=32, salt=preamble.salt, info=b"kamera.object.v1")
        self._gcm = AESGCM(hkdf.derive(key))
        self._bound = preamble.raw + name.encode()

    def encrypt(self, index: int, data: bytes) -> bytes:
        """Frame ``index`` (0: the head), with its tag appended; encrypt each index only once."""
        return self._gcm.encrypt(index.to_bytes(12, "big"), data, self._bound + index.to_bytes(8, "little"))

    def decrypt(self, index: int, what: str, data: bytes, source: str) -> bytes:
        """The inverse of `encrypt`. Raises `CorruptChunk`, which names ``what``, for any other bytes."""
        try:
            return self._gcm.decrypt(
                index.to_bytes(12, "big"), data, self._bound + index.to_bytes(8, "little")
            )
        except InvalidTag:
            raise CorruptChunk(f"{source}: its {what} cannot be decrypted, bytes have changed") from None


class Frames:
    """The tensors after the head (`opened.Payload`)."""

    def __init__(
        self, source: Source, cipher: Cipher, preamble: Preamble, groups: Mapping[str, Group], where: str
    ) -> None:
        self._source = source
        self._cipher = cipher
        self._where = where
        self._places: dict[str, tuple[int, int]] = {}  # group to its frame's index and start
        at = len(preamble.raw) + preamble.head
        for index, group in enumerate(groups.values(), 1):
            self._places[group.name] = index, at
            at += group.size + TAG
        if at != source.size:
            raise CorruptChunk(f"{where}: {source.size} bytes, its header tells of {at}")

    def fetch(self, group: Group, views: Sequence[memoryview]) -> None:
        """See `Payload`."""
        index, start = self._places[group.name]
        frame = self._source.read(start, group.size + TAG)
        if len(frame) < group.size + TAG:
            raise EOFError(f"the file ends at byte {start + len(frame)}, it had {self._source.size}")
        plain = memoryview(self._cipher.decrypt(index, group.name, frame, self._where))
        for view in views:
            view[:] = plain[: len(view)]
            plain = plain[len(view) :]
