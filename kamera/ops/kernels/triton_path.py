"""The fused operator on CUDA: one Triton launch for all channels of one shape, over all layers.

A launch reads a table in device memory, one line per channel, with the addresses of its inputs and output.
The patch is added before the rotation, in the canonical frame and in its stored precision, so that no factor
is rotated or rounded. Import this module only if triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from kamera.ops.kernels.launches import Line, Shape, factor_dtypes, launches, servable
from kamera.ops.kernels.triton_kernel import serve_kernel
from kamera.ops.kv import KV
from kamera.ops.layout import Layout
from kamera.ops.lowrank import Patch, floats
from kamera.ops.quantize import Codes
from kamera.ops.rope import turn_table

_FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_BITS = {torch.float32: tl.int32, torch.float16: tl.int16, torch.bfloat16: tl.int16}
INTERPRETED = not isinstance(serve_kernel, triton.JITFunction)
_TOKENS = 64


def can_write(into: KV, source: KV, patch: Patch | None, layout: Layout, *, phased_only: bool) -> bool:
    """True if the kernel supports these dtypes and strides."""
    known = frozenset(_FLOATS)
    return factor_dtypes(patch) <= known and servable(into, source, layout, known, phased_only=phased_only)


def write(
    into: KV,
    source: KV,
    patch: Patch | None,
    layout: Layout,
    offset: Sequence[int],
    *,
    phased_only: bool,
) -> None:
    """`kamera.ops.kernels.serve` for arguments that are checked and for which `can_write` is true."""
    found = factor_dtypes(patch)
    factor = found.pop() if len(found) == 1 else torch.float32  # float32 holds every dtype exactly
    work = launches(into, source, patch, layout, offset, phased_only=phased_only)
    for shape, lines in work.items():
        _launch(shape, lines, tuple(offset), factor)


def _launch(shape: Shape, lines: list[Line], offset: tuple[int, ...], factor: torch.dtype) -> None:
    first = lines[0].target
    tokens = first.shape[1]
    if tokens == 0:
        return
    bits = _factor_bits(lines)
    factors = [_factors(line, factor, bits) for line in lines]  # alive until the kernel is in the stream
    rank = max((line.factors.rank for line in lines if line.factors is not None), default=0)
    table = torch.tensor(
        [_addresses(line, f) for line, f in zip(lines, factors, strict=True)], dtype=torch.int64
    )
    if first.is_cuda:
        table = table.pin_memory().to(first.device, non_blocking=True)
    pairs = 0
    cos = sin = table
    if shape.rope is not None:
        pairs = shape.rope.rotary_dim // 2
        cos, sin = turn_table(shape.rope, offset, torch.float32, first.device)
    plain = not (pairs or rank or shape.bits) and shape.source == shape.target
    kinds = _BITS if plain else _FLOATS
    exact = shape.target == torch.float32 or INTERPRETED or not _has_tf32(first.device)
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        serve_kernel[(triton.cdiv(tokens, _TOKENS), shape.heads, len(lines))](
            table,
            cos,
            sin,
            tokens,
            *shape.strides,
            torch.finfo(shape.source).max,
            SOURCE=tl.uint8 if shape.bits else kinds[shape.source],
            STEP=_FLOATS[shape.source],
            TARGET=kinds[shape.target],
            FACTOR={8: tl.int8, 4: tl.uint8}.get(bits, _FLOATS[factor]),
            DIM=shape.dim,
            START=shape.start,
            PAIRS=pairs,
            INTERLEAVED=shape.rope is not None and shape.rope.pairing == "interleaved",
            BITS=shape.bits,
            TOKEN_GROUP=shape.token_group,
            FEATURE_GROUP=shape.feature_group,
            PLAIN=plain,
            FACTOR_BITS=bits,
            BLOCK_T=_TOKENS,
            BLOCK_P=max(16, triton.next_power_of_2(pairs)),
            BLOCK_D=min(128, max(16, triton.next_power_of_2(shape.dim - 2 * pairs))),
            BLOCK_R=0 if rank == 0 else min(64, max(16, triton.next_power_of_2(rank))),
            WIDEN=bits > 0
            or factor == torch.float32
            or INTERPRETED,  # the interpreter cannot multiply bfloat16
            PRECISION="ieee" if exact else "tf32x3",
            ALIGNED=all(_aligned(line.source) and _aligned(line.target) for line in lines),
            EVEN=all(_aligned(side) and side.shape[1] % 8 == 0 for held in factors for side in held[:2]),
        )


def _factor_bits(lines: list[Line]) -> int:
    """Bits of the factors' codes; 0 if any are floats or the widths differ."""
    sides = [side for x in lines if x.factors is not None for side in (x.factors.left, x.factors.right)]
    found = {side.bits if isinstance(side, Codes) else 0 for side in sides}
    return found.pop() if len(found) == 1 else 0


def _factors(line: Line, dtype: torch.dtype, bits: int) -> tuple[torch.Tensor, ...]:
    """Left and right factor in the kernel's layout (contiguous rows), and the scales of codes."""
    if line.factors is None:
        return ()
    sides, device = (line.factors.left, line.factors.right), line.target.device
    if bits:
        codes = [side for side in sides if isinstance(side, Codes)]
        held = [x.codes for x in codes] + [x.scales for x in codes]
        return tuple(t.to(device).contiguous() for t in held)
    return tuple(floats(side).to(device, dtype).contiguous() for side in sides)


def _addresses(line: Line, factors: tuple[torch.Tensor, ...]) -> list[int]:
    """A line of the table (`serve_kernel`)."""
    held = (line.source, line.steps, line.lows, line.target, *factors)
    addresses = [0 if t is None else t.data_ptr() for t in held]
    return [*addresses, *[0] * (8 - len(held)), 0 if line.factors is None else line.factors.rank]


def _aligned(x: torch.Tensor) -> bool:
    """True if every row starts at a multiple of 16 bytes."""
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1])


def _has_tf32(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
