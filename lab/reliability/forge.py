"""Object files taken apart and put together, with digests that fit: what somebody with write access can make.

Written after `docs/store-format.md` and not with the code that it judges.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

DIGEST = slice(35, 99)


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


def group_of(tensor: str) -> str:
    """The group a tensor is verified with."""
    kind, *rest = tensor.split("/")
    if kind == "kv" and len(rest) > 1:
        return "/".join((kind, *rest[:2]))
    return kind if kind in ("patch", "embeds") else "head"


def groups_of(data: bytes) -> dict[str, bytes]:
    """The bytes of each group of a file that can be taken apart."""
    outer, _, rest = split(data)
    found: dict[str, bytes] = {}
    places = {name: entry["data_offsets"] for name, entry in outer.items() if name != "__metadata__"}
    for name, (start, end) in sorted(places.items(), key=lambda place: place[1]):
        found[group_of(name)] = found.get(group_of(name), b"") + rest[start:end]
    return found


def seal(data: bytes) -> bytes:
    """``data`` with digests that fit: those of its groups, as far as they can be told, and the header's."""
    if len(data) < DIGEST.stop:
        return data
    end = min(max(front_of(data), DIGEST.stop), len(data))
    front, rest = data[:end], data[end:]
    try:
        for group, held in groups_of(data).items():
            told = re.escape(f'\\"{group}\\":\\"'.encode())
            digest = hashlib.sha256(held).hexdigest().encode()
            front = re.sub(b"(" + told + b")[0-9a-f]{64}", lambda m, d=digest: m.group(1) + d, front)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass  # no header that tells of groups: its own digest is all it can have
    return stamped(front) + rest


def stamped(front: bytes) -> bytes:
    """A header with the digest that fits, whatever it says of groups."""
    blank = front[: DIGEST.start] + b"0" * 64 + front[DIGEST.stop :]
    return front[: DIGEST.start] + hashlib.blake2b(blank, digest_size=32).hexdigest().encode() + blank[99:]
