"""The header of an object: writing it, and verifying one that is read.

A header has a digest of its own, at a fixed place, so it is verified before anything is parsed; and it
holds the digests of all pieces of the tensors.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError

from kamera.errors import CorruptChunk, ForeignObject, StoreError, StoreVersionError
from kamera.ops import PatchBudget
from kamera.store.digests import Hasher, hasher_of
from kamera.store.entries import TensorEntry, count_pieces, file_entries, meta_tensor_of
from kamera.store.fields import Header, canonical_json, is_count
from kamera.store.info import ObjectInfo
from kamera.store.keys import KINDS, PATCH_KINDS, Context, is_key, object_key
from kamera.store.outline import Outline
from kamera.store.records import Record, record_of

FORMAT_VERSION = 5
"""The format in an object's header; an object of any other raises `StoreVersionError`."""

PREFIX = b'{"__metadata__":{"header":"'
DIGEST = slice(8 + len(PREFIX), 8 + len(PREFIX) + 64)
"""Position of the digest in a file."""

MAX_HEADER = 4 * 2**20
"""Most bytes of a header: a real chunk's takes some 10 KiB, and reading a header takes 25 times its size."""
MALFORMED = (
    SafetensorError,
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that bytes with a matching digest can still raise if they were not written here. RuntimeError and
MemoryError are left out: lack of memory is no damage."""


@dataclass(frozen=True)
class ObjectHead:
    """A verified header: what the header of its record is.

    ``info`` has the size of the file, ``size`` is that of the tensors; ``entries`` are in the order of the
    file, ``digests`` those of its pieces in hex by ``hasher``; ``source`` names the file in errors.
    """

    info: ObjectInfo
    header: Header
    entries: Mapping[str, TensorEntry]
    digests: Sequence[str]
    hasher: Callable[[], Hasher]
    size: int
    source: str


def header_of(record: Record, created: float, digests: Mapping[str, Any]) -> Header:
    """The ``kamera`` header of the file of ``record``."""
    return {"format": FORMAT_VERSION, "created": created, **record.header(), "digests": dict(digests)}


def text_of(header: Header, entries: Mapping[str, TensorEntry]) -> bytes:
    """The header of the file with zeros for the digest, padded. Raises `ValueError` if it is too long."""
    fields: dict[str, Any] = {"__metadata__": {"header": "0" * 64, "kamera": canonical_json(header)}}
    fields.update({name: entry.to_header() for name, entry in entries.items()})
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes is over the limit of {MAX_HEADER}: less in info=")
    return text


def front_of(text: bytes, mac: bytes) -> bytes:
    """The front of a file: the length of ``text``, then ``text`` with its digest filled in."""
    front = bytearray(len(text).to_bytes(8, "little") + text)
    front[DIGEST] = _digest(front, mac)
    return bytes(front)


def front_size(first: bytes, total: int, source: str) -> int:
    """Bytes of length and header in a file of ``total`` bytes, by its ``first`` 99. Raises `CorruptChunk`."""
    if total < DIGEST.stop:
        raise CorruptChunk(f"{source}: truncated, {total} bytes cannot hold a header")
    size = int.from_bytes(first[:8], "little")
    if size > min(total - 8, MAX_HEADER) or size < DIGEST.stop - 8:
        raise CorruptChunk(f"{source}: impossible header length {size} in {total} bytes")
    if first[8 : 8 + len(PREFIX)] != PREFIX:
        raise CorruptChunk(f"{source}: no digest at its place, this is no object of a store")
    return 8 + size


def verify_header(front: bytes, source: str, mac: bytes = b"") -> Header:
    """The Kamera header of a ``front``, parsed after its digest is verified. Raises as `Codec.decode`."""
    if not hmac.compare_digest(front[DIGEST], _digest(front, mac)):
        if mac and front[DIGEST] == _digest(front, b""):
            raise ForeignObject(f"{source}: an intact object, but written without this store's secret")
        raise CorruptChunk(f"{source}: the digest does not match, bytes of the header have changed")
    return _parse(front[8:], source)


def read_head(front: bytes, total: int, source: str, mac: bytes = b"") -> ObjectHead:
    """The head of a file of ``total`` bytes by its ``front``. Raises as `Codec.decode`."""
    header = verify_header(front, source, mac)
    try:
        entries, size = _rebuilt(front[8:], header)
        digest_fields = header["digests"]
        digests, algorithm = digest_fields["pieces"], digest_fields["algorithm"]
        fits = isinstance(digests, list) and len(digests) == count_pieces(size)
        if len(digest_fields) > 2 or not fits or not all(map(is_key, digests)):
            raise ValueError(f"{len(digests)} digests of {size} bytes of tensors")
    except KeyError as error:
        raise CorruptChunk(f"{source}: {error} is missing") from error
    except MALFORMED as error:
        raise CorruptChunk(f"{source}: {error}") from error
    try:
        hasher = hasher_of(algorithm)
    except (StoreError, ValueError, TypeError) as error:
        raise StoreVersionError(f"{source}: its tensors cannot be verified here: {error}") from error
    return ObjectHead(info_of(header, total), header, entries, digests, hasher, size, source)


def _rebuilt(text: bytes, header: Header) -> tuple[dict[str, TensorEntry], int]:
    """Entries of the tensors and their bytes, by a header that must be the one way to write its record."""
    header_entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
    # shapes without memory: they are checked before memory is allocated for them
    record = record_of(header, {name: meta_tensor_of(entry) for name, entry in header_entries.items()})
    new_header = header_of(record, header["created"], header["digests"])
    # as text, because True == 1 == 1.0 in Python
    mine, theirs = ({n: canonical_json(v) for n, v in one.items()} for one in (new_header, header))
    if wrong_fields := sorted({name for name, _ in mine.items() ^ theirs.items()}):
        raise ValueError(f"header fields {wrong_fields} disagree with the tensors")
    tensors = record.tensors()
    if extra_names := header_entries.keys() - tensors.keys():
        raise ValueError(f"tensors the header does not name: {sorted(extra_names)}")
    entries = file_entries(tensors)
    undigested_text = text[: DIGEST.start - 8] + b"0" * 64 + text[DIGEST.stop - 8 :]
    if undigested_text != text_of(new_header, entries):
        raise ValueError("the header is not laid out as it is written")
    return entries, max((entry.end for entry in entries.values()), default=0)


def _parse(text: bytes, source: str) -> Header:
    """The Kamera header inside a safetensors header; its version, kind and key are checked."""
    try:
        metadata = json.loads(text)["__metadata__"]
        header = json.loads(metadata["kamera"])
        version = header["format"]
        if type(version) is not int or version < 1:
            raise ValueError(f"format version {version!r} is none")
        if version != FORMAT_VERSION:
            raise StoreVersionError(
                f"{source}: written in format {version}, this version reads {FORMAT_VERSION} alone: "
                "read it with the kamera that wrote it, or delete it"
            )
        if canonical_json(header) != metadata["kamera"]:
            raise ValueError("it is not in canonical form")
        if header["kind"] not in KINDS:
            raise ValueError(f"kind {header['kind']!r} is none of {', '.join(KINDS)}")
        key, info = _key_of(header), info_of(header, 0)
        if key != info.key:
            raise ValueError(f"key {info.key} is not that of its own fields, {key}")
        # fields that a listing shows; they are compared with the tensors when those are read
        if not (is_count(info.tokens) and (info.rank is None or is_count(info.rank))):
            raise ValueError(f"tokens {info.tokens!r} and rank {info.rank!r} must be counts")
        if not (isinstance(info.created, float) or is_count(info.created)):
            raise ValueError(f"created must be seconds, got {info.created!r}")
        if not isinstance(info.base, str) or not is_count(info.behind):
            raise ValueError(f"it stands on {info.base!r} behind {info.behind!r} tokens")
        if not isinstance(info.formed, str | None):
            raise ValueError(f"formed must be text, got {info.formed!r}")
    except KeyError as error:
        raise CorruptChunk(f"{source}: the header lacks {error}") from error
    except MALFORMED as error:
        raise CorruptChunk(f"{source}: malformed header: {error}") from error
    return dict(header)


def info_of(header: Header, size: int) -> ObjectInfo:
    """The info of a file of ``size`` bytes with this header."""
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
        budget=_budget_of(header),
        orderings=_orderings_of(header),
        base=header.get("vision") or header.get("base") or "",
        behind=header.get("behind", 0),
        error=_error_of(header),
        outline=Outline.from_header(header["outline"]) if "outline" in header else None,
    )


def _budget_of(header: Header) -> PatchBudget | None:
    """The budget of a patch; None if ``info``, which is free text to the format, holds none."""
    if header["kind"] not in PATCH_KINDS:
        return None
    try:
        return PatchBudget.from_info(header["info"], header["rank"])
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _error_of(header: Header) -> float | None:
    error: Any = header["info"].get("error") if header["kind"] in PATCH_KINDS else None
    return float(error) if type(error) in (int, float) and 0.0 <= error <= 1.0 else None


def _orderings_of(header: Header) -> int | None:
    orderings = header["info"].get("orderings") if header["kind"] == "orbit" else None
    return orderings if is_count(orderings) else None


def _digest(front: bytes | bytearray, mac: bytes) -> bytes:
    hasher = hashlib.blake2b(front[: DIGEST.start], digest_size=32, key=mac)
    hasher.update(b"0" * 64)
    hasher.update(front[DIGEST.stop :])
    return hasher.hexdigest().encode()


def _key_of(header: Header) -> str:
    antecedents, base = header.get("antecedents", ()), header.get("base", "")
    return object_key(header["kind"], Context(**header["context"]), header["chunk_id"], antecedents, base)
