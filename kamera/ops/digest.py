"""Content digests of tensors and fields: BLAKE2b-256, unambiguous, the same on every device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def digest(domain: str, *fields: bytes | str) -> str:
    """Hex BLAKE2b-256 over length-prefixed ``fields``; ``domain`` keeps kinds of keys apart."""
    state = hashlib.blake2b(digest_size=32)
    for field in (domain, *fields):
        raw = field.encode() if isinstance(field, str) else field
        state.update(len(raw).to_bytes(8, "little"))
        state.update(raw)
    return state.hexdigest()


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of dtype, shape and bytes; stride and device do not count."""
    plain = tensor.detach().cpu().contiguous()
    raw = plain.flatten().view(torch.uint8).numpy().tobytes()
    return digest("kamera.tensor", str(plain.dtype), repr(tuple(plain.shape)), raw)


def content_id(input_ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> str:
    """Identity of a chunk: token ids ``[tokens]`` and every named model input, pixels included."""
    named = (part for name in sorted(inputs) for part in (name, tensor_digest(inputs[name])))
    return digest("kamera.chunk", tensor_digest(input_ids.to(torch.int64)), *named)
