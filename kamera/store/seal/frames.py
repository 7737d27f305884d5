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
from kamera.store.seal.preamble import LENGTH, Preamble
from kamera.store.sources import ByteSource

TAG = 16
LARGEST = 64 * 2**20
"""Most bytes of a frame: a longer group is several, none of which takes much memory beside the tensors."""


def cuts(size: int) -> list[tuple[int, int]]:
    """Where the frames of a group of ``size`` bytes begin and end in it."""
    return [(start, min(start + LARGEST, size)) for start in range(0, size, LARGEST)] or [(0, 0)]


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
        self, source: ByteSource, cipher: Cipher, preamble: Preamble, groups: Mapping[str, Group], where: str
    ) -> None:
        self._source = source
        self._cipher = cipher
        self._where = where
        self._places: dict[str, tuple[int, int]] = {}  # group to the index and start of its first frame
        index, at = 1, LENGTH + preamble.head
        for group in groups.values():
            self._places[group.name] = index, at
            frames = len(cuts(group.size))
            index += frames
            at += group.size + frames * TAG
        if at != source.size:
            raise CorruptChunk(f"{where}: {source.size} bytes, its header tells of {at}")

    def fetch(self, group: Group, views: Sequence[memoryview]) -> None:
        index, at = self._places[group.name]
        room = [view for view in views if len(view)]
        for number, (start, end) in enumerate(cuts(group.size)):
            frame = self._source.read(at, end - start + TAG)
            at += len(frame)
            if len(frame) < end - start + TAG:
                raise EOFError(f"the file ends at byte {at}, it had {self._source.size}")
            plain = memoryview(self._cipher.decrypt(index + number, group.name, frame, self._where))
            while plain:
                filled = min(len(plain), len(room[0]))
                room[0][:filled] = plain[:filled]
                plain, room[0] = plain[filled:], room[0][filled:]
                room = room if len(room[0]) else room[1:]
