"""What a stored channel is and where it lies: floats or codes, on one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from kamera.ops.kv import KV
from kamera.ops.quantize_kv import CodedChannel, CodedKV

Stored = torch.Tensor | CodedChannel
"""One channel ``[heads, tokens, dim]`` as it is held."""


def stored_layers(source: KV) -> Sequence[Mapping[str, Stored]]:
    """The layers of a KV as they are held: reading a `CodedKV` through it would decode whole channels."""
    return source.layers if isinstance(source, CodedKV) else source


def value_dtype(held: Stored) -> torch.dtype:
    """The dtype of the values, decoded."""
    return held.dtype if isinstance(held, torch.Tensor) else held.steps.dtype


def beside(held: Stored, device: torch.device) -> Stored:
    """The same channel on ``device``: itself when it is there."""
    if isinstance(held, torch.Tensor):
        return held.to(device, non_blocking=True)
    if held.codes.device == device:
        return held
    codes, steps, lows = (t.to(device, non_blocking=True) for t in (held.codes, held.steps, held.lows))
    return replace(held, codes=codes, steps=steps, lows=lows)
