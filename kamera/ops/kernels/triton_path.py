"""The fused operator on CUDA: one Triton launch for all channels of one shape, over all layers.

A launch reads a table in device memory, one line per channel, with the addresses of what it reads and
writes. The patch is added before the turn, in the canonical frame and in the precision it is stored in, so
that no factor is turned or rounded. Import this module only where triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kamera.ops.kernels.place import Stored, beside, stored_layers, value_dtype
from kamera.ops.kernels.triton_kernel import serve_kernel
from kamera.ops.kv import KV
from kamera.ops.layout import Layout
from kamera.ops.lowrank import Codes, Factor, LowRank, Patch, floats
from kamera.ops.rope import RopeSpec, turn_table

_FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_BITS = {torch.float32: tl.int32, torch.float16: tl.int16, torch.bfloat16: tl.int16}
_INTERPRETED = not isinstance(serve_kernel, triton.JITFunction)
_TOKENS = 64


class _Shape(NamedTuple):
    """What all channels of one launch have in common."""

    heads: int
    dim: int
    rope: RopeSpec | None
    start: int
    source: torch.dtype
    target: torch.dtype
    coding: tuple[int, int, int]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    step_strides: tuple[int, ...]
    aligned: bool


class _Line(NamedTuple):
    """The tensors of one channel: values or codes, steps, lows, target, and both factors."""

    source: torch.Tensor
    steps: torch.Tensor | None
    lows: torch.Tensor | None
    target: torch.Tensor
    left: torch.Tensor | None
    right: torch.Tensor | None

    def addresses(self) -> list[int]:
        rank = 0 if self.left is None else self.left.shape[1]
        return [0 if t is None else t.data_ptr() for t in self] + [rank]


def can_write(into: KV, source: KV, patch: Patch | None, layout: Layout, *, phased_only: bool) -> bool:
    """Whether the kernel knows these dtypes and strides, all targets on one device."""
    factors = [f for layer in patch.layers for f in layer.values()] if patch is not None else []
    if any(_dtype(side) not in _FLOATS for f in factors for side in (f.left, f.right)):
        return False
    targets, held = [], []
    for spec, target, stored in zip(layout, into, stored_layers(source), strict=True):
        names = [c.name for c in spec.channels if c.rope is not None or not phased_only]
        targets += [target[name] for name in names]
        held += [stored[name] for name in names]
    return (
        len({t.device for t in targets}) == 1
        and all(t.dtype in _FLOATS and t.stride(2) == 1 for t in targets)
        and all(value_dtype(x) in _FLOATS for x in held)
    )


def write(
    into: KV,
    source: KV,
    patch: Patch | None,
    layout: Layout,
    offset: Sequence[int],
    *,
    phased_only: bool,
) -> None:
    """Write what `kamera.ops.kernels.serve` says; everything has been checked, `can_write` was true."""
    moves = any(offset)
    launches: dict[_Shape, list[_Line]] = {}
    factor_dtype = _factor_dtype(patch)
    for i, (spec, target, stored) in enumerate(zip(layout, into, stored_layers(source), strict=True)):
        for c in spec.channels:
            if c.rope is None and phased_only:
                continue
            y = target[c.name]
            factors = patch.layers[i].get(c.name) if patch is not None else None
            line, strides, coding = _line(beside(stored[c.name], y.device), y, factors, factor_dtype)
            rope = c.rope if moves and c.rope is not None and c.rope.rotary_dim else None
            shape = _Shape(
                c.heads,
                c.dim,
                rope,
                c.rotary_start if rope is not None else 0,
                value_dtype(stored[c.name]),
                y.dtype,
                coding,
                *strides,
                _aligned(line),
            )
            launches.setdefault(shape, []).append(line)
    for shape, lines in launches.items():
        _launch(shape, lines, tuple(offset), factor_dtype)


def _launch(shape: _Shape, lines: list[_Line], offset: tuple[int, ...], factor: torch.dtype) -> None:
    first = lines[0].target
    tokens = first.shape[1]
    if tokens == 0:
        return
    rank = max(0 if x.left is None else x.left.shape[1] for x in lines)
    pairs = 0 if shape.rope is None else shape.rope.rotary_dim // 2
    bits, token_group, feature_group = shape.coding
    plain = not (pairs or rank or bits) and shape.source == shape.target
    kinds = _BITS if plain else _FLOATS
    table = torch.tensor([x.addresses() for x in lines], dtype=torch.int64)
    if first.is_cuda:
        table = table.pin_memory().to(first.device, non_blocking=True)
    cos = sin = table
    if shape.rope is not None:
        cos, sin = turn_table(shape.rope, offset, torch.float32, first.device)
    exact = shape.target == torch.float32 or _INTERPRETED or not _has_tf32(first.device)
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        serve_kernel[(triton.cdiv(tokens, _TOKENS), shape.heads, len(lines))](
            table,
            cos,
            sin,
            tokens,
            *shape.source_strides,
            *shape.target_strides,
            *shape.step_strides,
            torch.finfo(shape.source).max,
            SOURCE=tl.uint8 if bits else kinds[shape.source],
            STEP=_FLOATS[shape.source],
            TARGET=kinds[shape.target],
            FACTOR=_FLOATS[factor],
            DIM=shape.dim,
            START=shape.start,
            PAIRS=pairs,
            INTERLEAVED=shape.rope is not None and shape.rope.pairing == "interleaved",
            BITS=bits,
            TOKEN_GROUP=token_group,
            FEATURE_GROUP=feature_group,
            PLAIN=plain,
            BLOCK_T=_TOKENS,
            BLOCK_P=max(16, triton.next_power_of_2(pairs)),
            BLOCK_D=min(128, max(16, triton.next_power_of_2(shape.dim - 2 * pairs))),
            BLOCK_R=0 if rank == 0 else min(64, max(16, triton.next_power_of_2(rank))),
            WIDEN=factor == torch.float32 or _INTERPRETED,  # the interpreter cannot multiply bfloat16
            PRECISION="ieee" if exact else "tf32x3",
            ALIGNED=shape.aligned,
        )


def _line(
    held: Stored, target: torch.Tensor, factors: LowRank | None, factor_dtype: torch.dtype
) -> tuple[_Line, tuple[tuple[int, ...], ...], tuple[int, int, int]]:
    """A channel's tensors as the kernel reads them; strides of source, target and steps; how it is coded."""
    left = right = None
    if factors is not None:
        left, right = (
            floats(f).to(target.device, factor_dtype).contiguous() for f in (factors.left, factors.right)
        )
    ahead = (target.stride(0), target.stride(1))
    if isinstance(held, torch.Tensor):
        x = held if held.stride(2) == 1 else held.contiguous()
        line = _Line(x, None, None, target, left, right)
        return line, ((x.stride(0), x.stride(1)), ahead, (0, 0, 0)), (0, 1, 1)
    codes, steps, lows = held.codes.contiguous(), held.steps.contiguous(), held.lows.contiguous()
    group = held.grid.group
    coding = (held.grid.bits, group, 1) if held.axis == "tokens" else (held.grid.bits, 1, group)
    line = _Line(codes, steps, lows, target, left, right)
    return line, ((codes.stride(0), codes.stride(1)), ahead, steps.stride()), coding


def _aligned(line: _Line) -> bool:
    """Whether source and target rows start at multiples of 16 bytes, so that loads can be wide."""
    return all(
        t.data_ptr() % 16 == 0 and all(s * t.element_size() % 16 == 0 for s in t.stride()[:2])
        for t in (line.source, line.target)
    )


def _dtype(side: Factor) -> torch.dtype:
    return torch.float32 if isinstance(side, Codes) else side.dtype


def _factor_dtype(patch: Patch | None) -> torch.dtype:
    """One dtype that holds every factor of ``patch`` as it is."""
    found = {
        _dtype(side)
        for layer in (patch.layers if patch is not None else ())
        for factors in layer.values()
        for side in (factors.left, factors.right)
    }
    return found.pop() if len(found) == 1 else torch.float32


def _has_tf32(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
