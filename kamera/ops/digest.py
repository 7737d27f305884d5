"""Content digests: BLAKE2b-256 in lower-case hex over length-prefixed fields.

The first field names the domain, so neither two lists of fields nor two kinds of content can share a
digest by concatenation.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch

_length = struct.Struct("<Q").pack


class _Frames(dict[str, bytes]):
    """Texts behind their lengths. Short ones are kept: a key has many names, and keys share them."""

    def __missing__(self, text: str) -> bytes:
        data = text.encode()
        framed = _length(len(data)) + data
        if len(data) <= 64:
            if len(self) >= 1 << 14:
                self.clear()
            self[text] = framed
        return framed


_frames = _Frames()


def digest(*fields: bytes | str | memoryview) -> str:
    """BLAKE2b-256 (64 hex digits) over the fields, each behind its length as 8 bytes little-endian.

    Text counts as its UTF-8. The first field should name the domain.
    """
    hasher = hashlib.blake2b(digest_size=32)
    if {*map(type, fields)} == {str}:  # together: keys have many, and each call costs
        hasher.update(b"".join(map(_frames.__getitem__, cast(Iterable[str], fields))))
        return hasher.hexdigest()
    for field in fields:
        data = field.encode() if isinstance(field, str) else field
        hasher.update(_length(len(data)))
        hasher.update(data)
    return hasher.hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The values of ``tensor`` in row-major order; not copied if contiguous on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # numpy knows no bfloat16 or float8, but it knows their bytes
    return flat.view(torch.uint8).numpy().data


def tensor_digest(tensors: torch.Tensor | Mapping[str, torch.Tensor]) -> str:
    """Digest of a tensor's dtype, shape and values, or of a mapping of named tensors.

    Device, strides and the order of the names do not matter.
    """
    if isinstance(tensors, torch.Tensor):
        dtype = str(tensors.dtype).removeprefix("torch.")
        shape = ",".join(map(str, tensors.shape))
        return digest("kamera.tensor.v1", dtype, shape, tensor_bytes(tensors))
    fields: list[str] = []
    for name in sorted(tensors):
        fields += (name, tensor_digest(tensors[name]))
    return digest("kamera.tensors.v1", *fields)


def ids_digest(ids: Sequence[int] | np.ndarray) -> str:
    """`tensor_digest` of token ids ``[S]`` as int64, from any sequence of whole numbers."""
    whole = np.ascontiguousarray(ids, dtype="<i8")
    return digest("kamera.tensor.v1", "int64", str(whole.shape[0]), whole.view(np.uint8).data)


def chunk_id(input_ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> str:
    """Content id of a chunk: a digest of its token ids ``[S]`` and of every named model input.

    ``inputs`` are the processed inputs (pixels, grids, …); their order does not matter. Raises
    `ValueError` if ``input_ids`` is not a vector of integers.
    """
    if input_ids.dim() != 1 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(
            f"input_ids must be integers [tokens], got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    ids = tensor_digest(input_ids.to(torch.int64))
    return digest("kamera.chunk.v1", ids, tensor_digest(inputs))
