"""The fused operator on CUDA: one Triton launch for a channel of all layers of a group.

The patch is added before the rotation, in the canonical frame and in its stored precision, so that no factor
is rotated or rounded. Import this module only if triton is installed.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch
import triton

from kamera.ops.kernels.launches import Launch, Writing, can_launch, launches
from kamera.ops.kernels.triton_kernel import serve_kernel
from kamera.ops.lowrank import floats
from kamera.ops.quantize import Codes
from kamera.ops.rope import rotation_table

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
INTERPRETED = not isinstance(serve_kernel, triton.JITFunction)
_TILES = {True: 128, False: 64}
"""Tokens of a tile, by whether the factors are codes. Of 32, 64 and 128, 128 is fastest for codes on an
H200; with float32 factors it would need more shared memory than a GPU has."""


def can_write(given: Writing) -> bool:
    """True if the kernel supports these dtypes and strides."""
    return can_launch(given, _FLOATS)


def write_kv(given: Writing) -> None:
    """`kamera.ops.kernels.serve` for arguments for which `can_write` is true."""
    for launch in launches(given):
        if launch.target.numel():
            with torch.cuda.device(launch.target.device) if launch.target.is_cuda else nullcontext():
                _launch(launch, given.offset)


class _Factors(NamedTuple):
    """Both factors (or their codes), their scales (codes only), each layer's first column and rank."""

    left: torch.Tensor
    right: torch.Tensor
    left_scales: torch.Tensor
    right_scales: torch.Tensor
    columns: torch.Tensor


def _launch(launch: Launch, offset: tuple[int, ...]) -> None:
    source, target = launch.source, launch.target
    layers, heads, tokens, dim = target.shape
    factors, bits = _factors(launch)  # alive until the kernel is in the stream
    tile = _TILES[bits > 0]
    ranks = () if launch.factors is None else launch.factors.ranks
    rank, pairs = max(ranks, default=0), 0
    cos = sin = source
    if launch.rope is not None:
        pairs = launch.rope.rotary_dim // 2
        cos, sin = rotation_table(launch.rope, offset, torch.float32, target.device)
    exact = target.dtype == torch.float32 or INTERPRETED or not _has_tf32(target.device)
    serve_kernel[(triton.cdiv(tokens, tile), heads, layers)](
        source,
        source if launch.steps is None else launch.steps,
        source if launch.lows is None else launch.lows,
        target,
        *factors,
        cos,
        sin,
        tokens,
        factors.left.shape[1],
        *launch.strides,
        torch.finfo(launch.dtype).max,
        DIM=dim,
        START=launch.start,
        PAIRS=pairs,
        INTERLEAVED=launch.rope is not None and launch.rope.pairing == "interleaved",
        BITS=launch.bits,
        TOKEN_GROUP=launch.token_group,
        FEATURE_GROUP=launch.feature_group,
        PLAIN=not (pairs or rank or launch.bits) and launch.dtype == target.dtype,
        FACTOR_BITS=bits,
        PARTS=3 if target.dtype == torch.float32 else 2,
        BLOCK_T=tile,
        BLOCK_P=max(16, triton.next_power_of_2(pairs)),
        BLOCK_D=min(128, max(16, triton.next_power_of_2(dim - 2 * pairs))),
        BLOCK_R=0 if rank == 0 else min(64, max(16, triton.next_power_of_2(rank))),
        WIDEN=INTERPRETED,  # the interpreter cannot multiply bfloat16
        PRECISION="ieee" if exact else "tf32x3",
        EVEN=all(r % 8 == 0 for r in ranks),
    )


def _factors(launch: Launch) -> tuple[_Factors, int]:
    """The factors on the target's device, and the bits of their codes (0: floats of one dtype)."""
    given, device = launch.factors, launch.target.device
    if given is None:
        return _Factors(*[launch.source] * 5), 0
    left, right, columns = given.left, given.right, given.columns.to(device)
    if isinstance(left, Codes) and isinstance(right, Codes) and left.bits == right.bits:
        parts = (left.codes, right.codes, left.scales, right.scales)
        one, two, first, second = (t.to(device).contiguous() for t in parts)
        return _Factors(one, two, first, second, columns), left.bits
    sides = [floats(side) for side in (left, right)]
    dtype = sides[0].dtype if sides[0].dtype == sides[1].dtype else torch.float32  # which holds every dtype
    one, two = (side.to(device, dtype).contiguous() for side in sides)
    return _Factors(one, two, one, two, columns), 0


@cache
def _has_tf32(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
