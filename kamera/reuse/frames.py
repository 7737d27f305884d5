"""The bytes of an index file: a chain of frames, each with a digest over itself and all before it.

A frame is ``length`` (4 bytes, little-endian), its complement, ``length`` bytes of payload, and the first 16
bytes of BLAKE2b over the previous digest and the payload. The first payload is the header, every other one a
record: one line of JSON, then token ids of 4 bytes each. Nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kamera.errors import CorruptIndex
from kamera.reuse.index import Record

FORMAT = 2
FIRST = b"\0" * 16
"""The digest before the first frame."""

_PREAMBLE = 8
_DIGEST = 16


def frame(payload: bytes, before: bytes) -> tuple[bytes, bytes]:
    """``payload`` as a frame after the digest ``before``, and the frame's own digest."""
    own = _digest(before, payload)
    length = len(payload)
    return length.to_bytes(4, "little") + (length ^ 0xFFFFFFFF).to_bytes(4, "little") + payload + own, own


def next_frame(data: memoryview, before: bytes, where: str) -> tuple[bytes, int, bytes] | None:
    """The first payload of ``data``, the frame's length in bytes and its digest; None if it is unfinished.

    Raises `CorruptIndex`, naming ``where``, for bytes that are not a beginning of a frame.
    """
    if len(data) < _PREAMBLE:
        return None
    length = int.from_bytes(data[:4], "little")
    if length ^ 0xFFFFFFFF != int.from_bytes(data[4:8], "little"):
        raise _damaged(where, "a frame's length is not what its complement says")
    size = _PREAMBLE + length + _DIGEST
    if len(data) < size:
        return None
    payload = bytes(data[_PREAMBLE : _PREAMBLE + length])
    own = bytes(data[_PREAMBLE + length : size])
    if own != _digest(before, payload):
        raise _damaged(where, "a frame is not what its digest says")
    return payload, size, own


def record_bytes(record: Record) -> bytes:
    """The payload of a record."""
    line = {
        "node": record.node,
        "lengths": record.lengths,
        "media": {i: digest for i, digest in enumerate(record.media) if digest},
    }
    return json.dumps(line, separators=(",", ":")).encode() + b"\n" + record.ids


def record_of(payload: bytes, where: str) -> Record:
    """The record of a payload. Raises `CorruptIndex` for an invalid one."""
    line, _, ids = payload.partition(b"\n")
    try:
        head = json.loads(line)
        lengths = tuple(_whole(n) for n in head["lengths"])
        media = [""] * len(lengths)
        for place, digest in head["media"].items():
            media[int(place)] = str(digest)
        record = Record(_whole(head["node"]), lengths, tuple(media), ids)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(where, f"a record is invalid ({type(error).__name__}: {error})") from None
    if 4 * sum(lengths) != len(ids):
        raise _damaged(where, "a record's lengths are not those of its tokens")
    return record


def header_bytes(facts: Mapping[str, Any]) -> bytes:
    """The payload of the first frame: the format, and the scope and rule of the index."""
    return json.dumps({"kamera": "content index", "format": FORMAT, **facts}, sort_keys=True).encode()


def header_of(payload: bytes, where: str) -> dict[str, Any]:
    """The facts of the first frame. Raises `CorruptIndex` for another format."""
    try:
        facts = json.loads(payload)
        known = facts["kamera"] == "content index" and facts["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError):
        known = False
    if not known:
        raise _damaged(where, f"it is not a content index of format {FORMAT}")
    return dict(facts)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _digest(before: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(before + payload, digest_size=_DIGEST).digest()


def _damaged(where: str, reason: str) -> CorruptIndex:
    return CorruptIndex(f"{where}: {reason}: rebuild the index with IndexFile.rebuild")
