"""Common to all records: the fields that identify them, and the canonical JSON text of a header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from kamera.store.keys import Context

Header = dict[str, Any]
"""JSON-able description of a record (`docs/stores.md` lists the fields)."""


def common_header(
    kind: str, key: str, chunk_id: str, context: Context, tokens: int, info: Mapping[str, Any]
) -> Header:
    """The fields that every header has."""
    return {
        "kind": kind,
        "key": key,
        "chunk_id": chunk_id,
        "context": {
            "fingerprint": context.fingerprint,
            "anchor": context.anchor,
            "tenant": context.tenant,
            **({"kv": context.kv} if context.lossy else {}),
            **({"origin": context.origin} if context.origin else {}),
        },
        "tokens": tokens,
        "info": dict(info),
    }


def check_identity(chunk_id: object, context: Context, info: object, **texts: object) -> None:
    """Raise `ValueError` unless ids, all fields of the context and ``texts`` are text, ``info`` a mapping."""
    for name, value in {"chunk_id": chunk_id, **vars(context), **texts}.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {value!r}")
    if not isinstance(info, Mapping):
        raise ValueError(f"info must be a mapping, got {type(info).__name__}")


def is_count(value: object) -> bool:
    """True if ``value`` is an int that a header may hold as a count."""
    return type(value) is int and 0 <= value < 2**53


def bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def canonical_json(value: object) -> str:
    """The one JSON text of ``value``: names sorted, no spaces, ASCII. Raises `ValueError` if it has none."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
