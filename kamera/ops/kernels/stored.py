"""What is served: stored blocks, in floats or in codes, and the targets they are written into."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kamera.ops.kv import KV
from kamera.ops.layout import Channel, Layout
from kamera.ops.lowrank import LowRanks, Patch
from kamera.ops.quantize_kv import CodedChannel, CodedKV

Stored = torch.Tensor | CodedChannel
"""One channel of a group of layers ``[layers, heads, tokens, dim]``, in floats or in codes."""


class Writing(NamedTuple):
    """The arguments of `kamera.ops.kernels.serve`, checked; ``patch`` is in the groups of ``into``."""

    into: KV
    source: KV
    patch: Patch | None
    layout: Layout
    offset: tuple[int, ...]
    phased_only: bool

    def channels(self) -> Iterator[tuple[Channel, Stored, torch.Tensor, LowRanks | None]]:
        """What is to be written of each group of layers: a channel, its source, its target, its factors."""
        for group, (stored, target) in enumerate(
            zip(stored_blocks(self.source), self.into.parts, strict=True)
        ):
            factors = {} if self.patch is None else self.patch.blocks.parts[group]
            for c in self.layout[self.into.groups[group][0]].channels:
                if c.rope is not None or not self.phased_only:
                    yield c, stored[c.name], target[c.name], factors.get(c.name)


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
