"""Objects of formats 1 to 3: one digest over the whole file, so they are read whole. No longer written."""

from __future__ import annotations

import hashlib
import hmac

import safetensors.torch

from kamera.errors import CorruptChunk, ForeignObject
from kamera.store.groups import laid_out
from kamera.store.head import DIGEST, MALFORMED, OLDER, Naming, complete, differences, parsed, text_of
from kamera.store.records import CanonicalRecord, PatchRecord


def decode_older(
    data: bytes, front: int, expected: str, source: str, mac: bytes, name: Naming, verify: bool
) -> CanonicalRecord | PatchRecord:
    """The record in ``data``, whose header ends at ``front``. As `format.decode`."""
    if verify and not hmac.compare_digest(data[DIGEST], _digest(data, mac)):
        if mac and data[DIGEST] == _digest(data, b""):
            raise ForeignObject(f"{source}: an intact object, but written without this store's secret")
        raise CorruptChunk(f"{source}: the digest does not match, bytes have changed")
    header = parsed(data[8:front], expected, source, name)
    if header["format"] > OLDER:
        raise CorruptChunk(f"{source}: of format {header['format']}, but not laid out as that is")
    cls = CanonicalRecord if header["kind"] == "canonical" else PatchRecord
    try:
        tensors = safetensors.torch.load(data)
        record: CanonicalRecord | PatchRecord = cls.from_parts(header, tensors)
        rebuilt = complete(record, header["created"])
        held = record.tensors()
        left_over = tensors.keys() - held.keys()
        wrong = differences(rebuilt, header)
        text = text_of(rebuilt, laid_out(held), "digest")
    except KeyError as error:
        raise CorruptChunk(f"{source}: {error} is missing") from error
    except MALFORMED as error:
        raise CorruptChunk(f"{source}: {error}") from error
    if left_over:
        raise CorruptChunk(f"{source}: tensors the header does not name: {sorted(left_over)}")
    if wrong:
        raise CorruptChunk(f"{source}: header fields {wrong} disagree with the tensors")
    # one record, one file: what two readers could take for two different things is none
    if data[8 : DIGEST.start] + b"0" * 64 + data[DIGEST.stop : front] != text:
        raise CorruptChunk(f"{source}: the header is not laid out as it is written")
    return record


def _digest(data: bytes, mac: bytes) -> bytes:
    view = memoryview(data)
    hasher = hashlib.blake2b(view[: DIGEST.start], digest_size=32, key=mac)
    hasher.update(b"0" * 64)
    hasher.update(view[DIGEST.stop :])
    return hasher.hexdigest().encode()
