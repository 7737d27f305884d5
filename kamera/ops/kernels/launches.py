"""What is served, stored blocks in floats or in codes, and launches of a kernel that write it.

A launch is one channel of a group of equal layers, a line of its table a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from kamera.ops.kv import KV
from kamera.ops.layout import Channel, Layout
from kamera.ops.lowrank import LowRanks, Patch
from kamera.ops.quantize import CodedChannel, CodedKV, Codes
from kamera.ops.rope import RopeSpec

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

    def channels(self) -> list[tuple[Channel, Stored, torch.Tensor, LowRanks | None]]:
        """What is to be written of each group of layers: a channel, its source, its target, its factors."""
        found: list[tuple[Channel, Stored, torch.Tensor, LowRanks | None]] = []
        for group, (stored, target) in enumerate(
            zip(stored_blocks(self.source), self.into.parts, strict=True)
        ):
            factors = {} if self.patch is None else self.patch.blocks.parts[group]
            for c in self.layout[self.into.groups[group][0]].channels:
                if c.rope is not None or not self.phased_only:
                    found.append((c, stored[c.name], target[c.name], factors.get(c.name)))
        return found


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


class Launch(NamedTuple):
    """A block ``[layers, heads, tokens, dim]`` to be written.

    ``source`` are values or codes, ``steps`` and ``lows`` those of codes, ``factors`` the patch. ``rope`` is
    None if no phase is rotated. ``bits`` 0 means floats; in codes ``token_group`` tokens and
    ``feature_group`` features share a step (0: all of them). ``strides`` are in entries: of source (or codes)
    by layer, head and token, of the target likewise, of the steps by layer, head, token and feature.
    """

    source: torch.Tensor
    steps: torch.Tensor | None
    lows: torch.Tensor | None
    target: torch.Tensor
    factors: LowRanks | None
    dtype: torch.dtype
    rope: RopeSpec | None
    start: int
    bits: int
    token_group: int
    feature_group: int
    strides: tuple[int, ...]


def launches(given: Writing) -> list[Launch]:
    """The blocks that `kamera.ops.kernels.serve` writes."""
    blocks, moves = list[Launch](), any(given.offset)
    for c, stored, target, factors in given.channels():
        turned = c.rope if moves and c.rope is not None and c.rope.rotary_dim else None
        blocks.append(_launch(stored, target, factors, turned, c.rotary_start if turned is not None else 0))
    return blocks


def can_launch(given: Writing, dtypes: frozenset[torch.dtype]) -> bool:
    """True if all targets are on one device with adjacent features, and all values are of ``dtypes``.

    A tensor of a class of its own (packed, wrapped) has no memory that a kernel could read.
    """
    device: torch.device | None = None
    for _, x, y, _ in given.channels():
        device = device or y.device
        if (
            type(y) is not torch.Tensor
            or (isinstance(x, torch.Tensor) and type(x) is not torch.Tensor)
            or y.device != device
            or y.stride(3) != 1
            or y.dtype not in dtypes
            or value_dtype(x) not in dtypes
        ):
            return False
    return device is not None and factor_dtypes(given.patch) <= dtypes


def factor_dtypes(patch: Patch | None) -> set[torch.dtype]:
    """The dtypes of a patch's factors; codes decode to float32."""
    blocks = patch.blocks.parts if patch is not None else ()
    sides = [side for block in blocks for f in block.values() for side in (f.left, f.right)]
    return {torch.float32 if isinstance(side, Codes) else side.dtype for side in sides}


def _launch(
    held: Stored, target: torch.Tensor, factors: LowRanks | None, rope: RopeSpec | None, start: int
) -> Launch:
    held = on_device(held, target.device)
    if isinstance(held, torch.Tensor):
        x = held if held.stride(3) == 1 else held.contiguous()
        strides = (*x.stride()[:3], *target.stride()[:3], 0, 0, 0, 0)
        return Launch(x, None, None, target, factors, held.dtype, rope, start, 0, 1, 1, strides)
    codes, steps, lows = held.codes.contiguous(), held.steps.contiguous(), held.lows.contiguous()
    group = held.grid.group
    coding = (held.grid.bits, group, 1) if held.axis == "tokens" else (held.grid.bits, 1, group)
    strides = (*codes.stride()[:3], *target.stride()[:3], *steps.stride())
    return Launch(codes, steps, lows, target, factors, steps.dtype, rope, start, *coding, strides)
