"""Launches of a compiled kernel: channels of one shape, with the tensors each reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kamera.ops.kernels.stored import Stored, on_device, stored_layers, value_dtype
from kamera.ops.kv import KV
from kamera.ops.layout import Layout
from kamera.ops.lowrank import Factor, LowRank, Patch
from kamera.ops.quantize import Codes
from kamera.ops.rope import RopeSpec


class Shape(NamedTuple):
    """Properties that all channels of one launch share.

    ``rope`` is None if no phase is rotated. ``bits`` 0 means floats; in codes ``token_group`` tokens and
    ``feature_group`` features share a step (0: all of them). Strides are in entries: of source (or codes)
    by head and token, of the target by head and token, of the steps by head, token and feature.
    """

    heads: int
    dim: int
    rope: RopeSpec | None
    start: int
    source: torch.dtype
    target: torch.dtype
    bits: int
    token_group: int
    feature_group: int
    strides: tuple[int, ...]


class Line(NamedTuple):
    """One channel: values or codes, steps and lows of codes, the target, and the patch."""

    source: torch.Tensor
    steps: torch.Tensor | None
    lows: torch.Tensor | None
    target: torch.Tensor
    factors: LowRank | None


def launches(
    into: KV,
    source: KV,
    patch: Patch | None,
    layout: Layout,
    offset: Sequence[int],
    *,
    phased_only: bool,
) -> dict[Shape, list[Line]]:
    """The channels that `kamera.ops.kernels.serve` writes, grouped by shape."""
    moves = any(offset)
    found: dict[Shape, list[Line]] = {}
    for i, (spec, target, stored) in enumerate(zip(layout, into, stored_layers(source), strict=True)):
        factors = patch.layers[i] if patch is not None else {}
        for c in spec.channels:
            if c.rope is None and phased_only:
                continue
            turned = c.rope if moves and c.rope is not None and c.rope.rotary_dim else None
            line, coding, strides = _read(stored[c.name], target[c.name], factors.get(c.name))
            shape = Shape(
                c.heads,
                c.dim,
                turned,
                c.rotary_start if turned is not None else 0,
                value_dtype(stored[c.name]),
                line.target.dtype,
                *coding,
                strides,
            )
            found.setdefault(shape, []).append(line)
    return found


def servable(
    into: KV, source: KV, layout: Layout, dtypes: frozenset[torch.dtype], *, phased_only: bool
) -> bool:
    """True if all targets are on one device with adjacent features, and all values are of ``dtypes``.

    A tensor of a class of its own (packed, wrapped) has no memory that a kernel could read.
    """
    device: torch.device | None = None
    for spec, target, stored in zip(layout, into, stored_layers(source), strict=True):
        for c in spec.channels:
            if c.rope is not None or not phased_only:
                x, y = stored[c.name], target[c.name]
                device = device or y.device
                if (
                    type(y) is not torch.Tensor
                    or (isinstance(x, torch.Tensor) and type(x) is not torch.Tensor)
                    or y.device != device
                    or y.stride(2) != 1
                    or y.dtype not in dtypes
                    or value_dtype(x) not in dtypes
                ):
                    return False
    return device is not None


def factor_dtypes(patch: Patch | None) -> set[torch.dtype]:
    """The dtypes of a patch's factors; codes decode to float32."""

    def dtype(side: Factor) -> torch.dtype:
        return torch.float32 if isinstance(side, Codes) else side.dtype

    layers = patch.layers if patch is not None else ()
    return {dtype(side) for layer in layers for f in layer.values() for side in (f.left, f.right)}


def _read(
    held: Stored, target: torch.Tensor, factors: LowRank | None
) -> tuple[Line, tuple[int, int, int], tuple[int, ...]]:
    held = on_device(held, target.device)
    if isinstance(held, torch.Tensor):
        x = held if held.stride(2) == 1 else held.contiguous()
        strides = (*x.stride()[:2], *target.stride()[:2], 0, 0, 0)
        return Line(x, None, None, target, factors), (0, 1, 1), strides
    codes, steps, lows = held.codes.contiguous(), held.steps.contiguous(), held.lows.contiguous()
    group = held.grid.group
    coding = (held.grid.bits, group, 1) if held.axis == "tokens" else (held.grid.bits, 1, group)
    strides = (*codes.stride()[:2], *target.stride()[:2], *steps.stride())
    return Line(codes, steps, lows, target, factors), coding, strides
