"""The fused operator on CUDA: one Triton launch for a channel of all layers of a group.

A launch reads a table in device memory, one line per layer, with the addresses of its inputs and output.
The patch is added before the rotation, in the canonical frame and in its stored precision, so that no factor
is rotated or rounded. Import this module only if triton is installed.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from kamera.ops.kernels.launches import Launch, factor_dtypes, launches, servable
from kamera.ops.kernels.stored import Writing
from kamera.ops.kernels.triton_kernel import serve_kernel
from kamera.ops.lowrank import floats
from kamera.ops.quantize import Codes
from kamera.ops.rope import turn_table

_FLOATS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_BITS = {torch.float32: tl.int32, torch.float16: tl.int16, torch.bfloat16: tl.int16}
INTERPRETED = not isinstance(serve_kernel, triton.JITFunction)
_TOKENS = 64


def can_write(given: Writing) -> bool:
    """True if the kernel supports these dtypes and strides."""
    return servable(given, frozenset(_FLOATS))


def write(given: Writing) -> None:
    """`kamera.ops.kernels.serve` for arguments for which `can_write` is true."""
    found = factor_dtypes(given.patch)
    factor = found.pop() if len(found) == 1 else torch.float32  # float32 holds every dtype exactly
    for launch in launches(given):
        _launch(launch, given.offset, factor)


def _launch(launch: Launch, offset: tuple[int, ...], factor: torch.dtype) -> None:
    target = launch.target
    layers, heads, tokens, dim = target.shape
    if not target.numel():
        return
    bits = _factor_bits(launch)
    factors = _factors(launch, factor, bits)  # alive until the kernel is in the stream
    rank = 0 if launch.factors is None else launch.factors.rank
    table = torch.tensor(_table(launch, factors, bits), dtype=torch.int64)
    if target.is_cuda:
        table = table.pin_memory().to(target.device, non_blocking=True)
    pairs = 0
    cos = sin = table
    if launch.rope is not None:
        pairs = launch.rope.rotary_dim // 2
        cos, sin = turn_table(launch.rope, offset, torch.float32, target.device)
    plain = not (pairs or rank or launch.bits) and launch.dtype == target.dtype
    kinds = _BITS if plain else _FLOATS
    exact = target.dtype == torch.float32 or INTERPRETED or not _has_tf32(target.device)
    with torch.cuda.device(target.device) if target.is_cuda else nullcontext():
        serve_kernel[(triton.cdiv(tokens, _TOKENS), heads, layers)](
            table,
            cos,
            sin,
            tokens,
            *launch.strides,
            torch.finfo(launch.dtype).max,
            SOURCE=tl.uint8 if launch.bits else kinds[launch.dtype],
            STEP=_FLOATS[launch.dtype],
            TARGET=kinds[target.dtype],
            FACTOR={8: tl.int8, 4: tl.uint8}.get(bits, _FLOATS[factor]),
            DIM=dim,
            START=launch.start,
            PAIRS=pairs,
            INTERLEAVED=launch.rope is not None and launch.rope.pairing == "interleaved",
            BITS=launch.bits,
            TOKEN_GROUP=launch.token_group,
            FEATURE_GROUP=launch.feature_group,
            PLAIN=plain,
            FACTOR_BITS=bits,
            BLOCK_T=_TOKENS,
            BLOCK_P=max(16, triton.next_power_of_2(pairs)),
            BLOCK_D=min(128, max(16, triton.next_power_of_2(dim - 2 * pairs))),
            BLOCK_R=0 if rank == 0 else min(64, max(16, triton.next_power_of_2(rank))),
            WIDEN=bits > 0
            or factor == torch.float32
            or INTERPRETED,  # the interpreter cannot multiply bfloat16
            PRECISION="ieee" if exact else "tf32x3",
            ALIGNED=_aligned(launch.source) and _aligned(target),
            EVEN=_even(launch, factors, bits),
        )


def _factor_bits(launch: Launch) -> int:
    """Bits of the factors' codes; 0 if any are floats or the widths differ."""
    sides = [] if launch.factors is None else [launch.factors.left, launch.factors.right]
    found = {side.bits if isinstance(side, Codes) else 0 for side in sides}
    return found.pop() if len(found) == 1 else 0


def _factors(launch: Launch, dtype: torch.dtype, bits: int) -> tuple[torch.Tensor, ...]:
    """Left and right factor in the kernel's layout (contiguous rows), and the scales of codes."""
    if launch.factors is None:
        return ()
    sides, device = (launch.factors.left, launch.factors.right), launch.target.device
    if bits:
        codes = [side for side in sides if isinstance(side, Codes)]
        held = [x.codes for x in codes] + [x.scales for x in codes]
        return tuple(t.to(device).contiguous() for t in held)
    return tuple(floats(side).to(device, dtype).contiguous() for side in sides)


def _table(launch: Launch, factors: tuple[torch.Tensor, ...], bits: int) -> list[tuple[int, ...]]:
    """The lines of the table (`serve_kernel`)."""
    rows = [*map(launch.addresses, (launch.source, launch.steps, launch.lows, launch.target))]
    nothing = [0] * launch.target.shape[0]
    if launch.factors is None:
        return list(zip(*rows, *[nothing] * 6, strict=True))
    sides = [launch.columns(side, bits == 4) for side in factors[:2]]
    scales = [launch.columns(side) for side in factors[2:]] or [nothing, nothing]
    width = [factors[0].shape[1]] * len(nothing)
    return list(zip(*rows, *sides, *scales, list(launch.factors.ranks), width, strict=True))


def _even(launch: Launch, factors: tuple[torch.Tensor, ...], bits: int) -> bool:
    """True if rows of all factors start at multiples of 16 bytes, and every rank divides by 8."""
    if launch.factors is None:
        return True
    starts = [address for side in factors[:2] for address in launch.columns(side, bits == 4)]
    whole = all(_aligned(side) and side.shape[1] % 8 == 0 for side in factors[:2])
    return whole and all(a % 16 == 0 for a in starts) and all(r % 8 == 0 for r in launch.factors.ranks)


def _aligned(x: torch.Tensor) -> bool:
    """True if every row starts at a multiple of 16 bytes."""
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1])


def _has_tf32(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
