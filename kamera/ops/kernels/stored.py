"""A stored block, in floats or in codes, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from kamera.ops.kv import KV
from kamera.ops.quantize_kv import CodedChannel, CodedKV

Stored = torch.Tensor | CodedChannel
"""One channel of a group of layers ``[layers, heads, tokens, dim]``, in floats or in codes."""


def stored_blocks(source: KV) -> Sequence[Mapping[str, Stored]]:
    """The blocks of a KV, codes undecoded: reading a part of a `CodedKV` would decode it."""
    return source.codes.parts if isinstance(source, CodedKV) else source.parts


def value_dtype(held: Stored) -> torch.dtype:
    """The dtype of the decoded values."""
    return held.dtype if isinstance(held, torch.Tensor) else held.steps.dtype


def on_device(held: Stored, device: torch.device) -> Stored:
    """The block on ``device``: ``held`` itself if it is there already."""
    if isinstance(held, torch.Tensor):
        return held.to(device, non_blocking=True)
    if held.codes.device == device:
        return held
    codes, steps, lows = (t.to(device, non_blocking=True) for t in (held.codes, held.steps, held.lows))
    return replace(held, codes=codes, steps=steps, lows=lows)
