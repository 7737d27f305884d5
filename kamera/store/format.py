"""One object, one safetensors file, every byte of it under one digest.

The file is written here and not by the library, because the digest has to stand at a fixed place:
then it is verified before anything in the file is parsed. `docs/store-format.md` specifies it; any
safetensors reader reads it. Pickle is never involved.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import safetensors.torch
import torch
from safetensors import SafetensorError

from kamera.errors import CorruptChunk, ForeignObject, StoreVersionError
from kamera.ops.digest import tensor_bytes
from kamera.store.info import ObjectInfo
from kamera.store.keys import KINDS, Context, canonical_key, patch_key
from kamera.store.records import (
    CanonicalRecord,
    Header,
    PatchRecord,
    Record,
    canonical_json,
)

FORMAT_VERSION = 3
"""Newest version of what stands in an object's header; each is written in the oldest that can say it.

The envelope (digest at its place) never changes.
"""

DIRECTORY_VERSION = 1
"""Version of how a store's folder is laid out."""

Naming = Callable[[str], str]
"""What an object is called, given its key; `str` when it is called what its key is."""

_PREFIX = b'{"__metadata__":{"digest":"'
_DIGEST = slice(8 + len(_PREFIX), 8 + len(_PREFIX) + 64)
_MAX_HEADER = 100_000_000  # the limit of the safetensors format
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# What bytes that passed the digest but were not written by `encode` can still provoke. Not
# RuntimeError or MemoryError: want of memory is no damage.
_MALFORMED = (
    SafetensorError,
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


def encode(record: Record, created: float, mac: bytes = b"") -> bytes:
    """The file of ``record``: same record and ``created`` (seconds), same bytes.

    ``mac`` (up to 64 bytes) keys the digest: nobody without it writes a file that passes. Tensors may
    be on any device, strided, or share memory. Raises `ValueError` for what the format cannot hold (a
    dtype without a safetensors name, info that is not JSON).
    """
    text, tensors = _layout(record, created)
    head = bytearray(len(text).to_bytes(8, "little") + text)  # the digest still zeros
    parts = [tensor_bytes(tensor) for tensor in tensors]
    hasher = hashlib.blake2b(head, digest_size=32, key=mac)
    for part in parts:
        hasher.update(part)
    head[_DIGEST] = hasher.hexdigest().encode()
    return b"".join([head, *parts])


def decode(
    data: bytes, expected: str, source: str, mac: bytes = b"", name: Naming = str, *, verify: bool = True
) -> CanonicalRecord | PatchRecord:
    """The record in ``data``, whose key is called ``expected`` by ``name``.

    ``source`` names the bytes in errors; ``mac`` is the one `encode` had. Raises `CorruptChunk` for
    anything that `encode` did not write for that key, and `StoreVersionError` for an intact object of
    a newer format. Without ``verify`` changed tensors go unnoticed: for measurements only.
    """
    size = _header_size(data[:8], len(data), source)
    if data[8 : 8 + len(_PREFIX)] != _PREFIX:
        raise CorruptChunk(f"{source}: no digest at its place, this is no object of a store")
    if verify and not hmac.compare_digest(data[_DIGEST], _digest(data, mac).encode()):
        if mac and data[_DIGEST] == _digest(data).encode():
            raise ForeignObject(f"{source}: an intact object, but written without this store's secret")
        raise CorruptChunk(f"{source}: the digest does not match, bytes have changed")
    header = _header(data[8 : 8 + size], expected, source, name)
    cls = CanonicalRecord if header["kind"] == "canonical" else PatchRecord
    try:
        tensors = safetensors.torch.load(data)
        record: CanonicalRecord | PatchRecord = cls.from_parts(header, tensors)
        rebuilt = _complete(record, header["created"])
        left_over = tensors.keys() - record.tensors().keys()
        wrong = sorted(n for n in rebuilt.keys() | header.keys() if _differ(n, rebuilt, header))
        text, _ = _layout(record, header["created"])
    except KeyError as error:
        raise CorruptChunk(f"{source}: {error} is missing") from error
    except _MALFORMED as error:
        raise CorruptChunk(f"{source}: {error}") from error
    if left_over:
        raise CorruptChunk(f"{source}: tensors the header does not name: {sorted(left_over)}")
    if wrong:
        raise CorruptChunk(f"{source}: header fields {wrong} disagree with the tensors")
    # one record, one file: what two readers could take for two different things is none
    if data[8 : _DIGEST.start] + b"0" * 64 + data[_DIGEST.stop : 8 + size] != text:
        raise CorruptChunk(f"{source}: the header is not laid out as it is written")
    return record


def read_info(file: BinaryIO, size: int, expected: str, source: str, name: Naming = str) -> ObjectInfo:
    """What the header of an object file of ``size`` bytes says.

    Neither tensors nor digest are read: good for listing, never for serving. Raises as `decode`.
    """
    text = file.read(_header_size(file.read(8), size, source))
    return _info(_header(text, expected, source, name), size)


def describe(record: Record, created: float, size: int) -> ObjectInfo:
    """What `read_info` says of the file that `encode` makes of ``record``."""
    return _info(_complete(record, created), size)


def _info(header: Header, size: int) -> ObjectInfo:
    return ObjectInfo(
        key=header["key"],
        kind=header["kind"],
        chunk_id=header["chunk_id"],
        context=Context(**header["context"]),
        antecedents=tuple(header.get("antecedents", ())),
        tokens=header["tokens"],
        rank=header.get("rank"),
        formed=header.get("formed"),
        bytes=size,
        created=header["created"],
    )


def _layout(record: Record, created: float) -> tuple[bytes, list[torch.Tensor]]:
    """The header of the file with zeros for the digest, and the tensors in the order of the file."""
    kamera = canonical_json(_complete(record, created))
    fields: dict[str, Any] = {"__metadata__": {"digest": "0" * 64, "kamera": kamera}}
    offset = 0
    tensors = record.tensors()
    # widest first, so that every tensor starts at a multiple of its element size
    names = sorted(tensors, key=lambda n: (-tensors[n].element_size(), n))
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor {name!r}: {tensor.dtype} cannot be stored")
        end = offset + tensor.numel() * tensor.element_size()
        fields[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes is over the limit of {_MAX_HEADER}")
    return text, [tensors[name] for name in names]


def _complete(record: Record, created: float) -> Header:
    return {"format": record.format, "created": created, **record.header()}


def _differ(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    if name not in mine or name not in theirs:
        return True
    # as text, because True == 1 == 1.0 in Python
    return canonical_json(mine[name]) != canonical_json(theirs[name])


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _digest(data: bytes, mac: bytes = b"") -> str:
    view = memoryview(data)
    hasher = hashlib.blake2b(view[: _DIGEST.start], digest_size=32, key=mac)
    hasher.update(b"0" * 64)
    hasher.update(view[_DIGEST.stop :])
    return hasher.hexdigest()


def _header_size(first: bytes, total: int, source: str) -> int:
    if total < _DIGEST.stop:
        raise CorruptChunk(f"{source}: truncated, {total} bytes cannot hold a header")
    size = int.from_bytes(first, "little")
    if size > min(total - 8, _MAX_HEADER) or size < _DIGEST.stop - 8:
        raise CorruptChunk(f"{source}: impossible header length {size} in {total} bytes")
    return size


def _header(text: bytes, expected: str, source: str, name: Naming) -> Header:
    """The Kamera header inside the safetensors header, its version, kind and key checked."""
    try:
        metadata = json.loads(text)["__metadata__"]
        header = json.loads(metadata["kamera"])
        version = header["format"]
        if type(version) is not int or version < 1:
            raise ValueError(f"format version {version!r} is none")
        if version > FORMAT_VERSION:
            raise StoreVersionError(
                f"{source}: written in format {version}, this version reads up to "
                f"{FORMAT_VERSION}; upgrade kamera to read it"
            )
        if canonical_json(header) != metadata["kamera"]:
            raise ValueError("it is not in canonical form")
        if header["kind"] not in KINDS:
            raise ValueError(f"kind {header['kind']!r} is none of {', '.join(KINDS)}")
        key, info = _key_of(header), _info(header, 0)
        if key != info.key:
            raise ValueError(f"key {info.key} is not that of its own fields, {key}")
        # what a listing shows; whether it is true of the tensors is checked when they are read
        if not (_is_count(info.tokens) and (info.rank is None or _is_count(info.rank))):
            raise ValueError(f"tokens {info.tokens!r} and rank {info.rank!r} must be counts")
        if not (isinstance(info.created, float) or _is_count(info.created)):
            raise ValueError(f"created must be seconds, got {info.created!r}")
        if not isinstance(info.formed, str | None):
            raise ValueError(f"formed must be text, got {info.formed!r}")
        if name(key) != expected:
            raise ValueError(f"it is of object {name(key)}, expected {expected}")
    except KeyError as error:
        raise CorruptChunk(f"{source}: the header lacks {error}") from error
    except _MALFORMED as error:
        raise CorruptChunk(f"{source}: malformed header: {error}") from error
    return dict(header)


def _key_of(header: Header) -> str:
    context = Context(**header["context"])
    if header["kind"] == "canonical":
        return canonical_key(context, header["chunk_id"])
    return patch_key(context, header["chunk_id"], header["antecedents"], header["kind"])
