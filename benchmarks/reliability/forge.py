"""Object files taken apart and put together, with digests that fit: what somebody with write access can make.

Written after `docs/stores.md` and not with the code that it judges.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from blake3 import blake3
from xxhash import xxh3_128

DIGEST = slice(35, 99)
PIECE = 8 * 2**20
HASHES: dict[bytes, Any] = {b"blake3": blake3, b"xxh3-128": xxh3_128}


def front_of(data: bytes) -> int:
    """Where the header of a file ends, by what it says itself."""
    return 8 + int.from_bytes(data[:8], "little")


def split(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Safetensors header, Kamera header, and the tensors' bytes, of an object file."""
    end = front_of(data)
    outer = json.loads(data[8:end])
    return outer, json.loads(outer["__metadata__"]["kamera"]), data[end:]


def join(outer: dict[str, Any], kamera: Any, rest: bytes) -> bytes:
    """The inverse of `split`, sealed; ``kamera`` as text is taken literally."""
    if not isinstance(kamera, str):
        kamera = json.dumps(kamera, sort_keys=True, separators=(",", ":"))
    fields = outer | {"__metadata__": {"header": "0" * 64, **outer["__metadata__"], "kamera": kamera}}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return seal(len(text).to_bytes(8, "little") + text + rest)


def seal(data: bytes) -> bytes:
    """``data`` with digests that fit: those of its pieces, as far as they are told, and the header's."""
    if len(data) < DIGEST.stop:
        return data
    end = min(max(front_of(data), DIGEST.stop), len(data))
    front, rest = data[:end], data[end:]
    named = re.search(rb'\\"algorithm\\":\\"([a-z0-9-]+)\\"', front)
    hashed = HASHES.get(named.group(1) if named else b"", hashlib.sha256)
    digests = ",".join(
        f'\\"{hashed(rest[start : start + PIECE]).hexdigest()}\\"' for start in range(0, len(rest), PIECE)
    )
    told = re.compile(rb'(\\"pieces\\":\[)(\\"[0-9a-f]{32,64}\\",?)*(?=\])')
    found = told.search(front)
    if found is not None and found.end() - found.start() == len(found.group(1)) + len(digests):
        front = front[: found.end(1)] + digests.encode() + front[found.end() :]
    return stamped(front) + rest


def stamped(front: bytes) -> bytes:
    """A header with the digest that fits, whatever it says of pieces."""
    blank = front[: DIGEST.start] + b"0" * 64 + front[DIGEST.stop :]
    return front[: DIGEST.start] + hashlib.blake2b(blank, digest_size=32).hexdigest().encode() + blank[99:]
