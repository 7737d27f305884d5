"""The fused operator in plain torch, in tiles that stay in the processor's cache between passes.

A free channel without a patch is one copy. Any other channel is written tile by tile: widen (or decode)
into a buffer, add U Vᵀ, rotate, cast into the target. The patch is added before the rotation, in the
canonical frame, so that not even its right factor is rotated. Passes that a tile does not need are left
out: a float32 channel is rotated straight from source to target.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange

from kamera.ops.kernels.decode import decode_tile
from kamera.ops.kernels.stored import Stored, Writing, on_device, value_dtype
from kamera.ops.kernels.turn import rotate_into
from kamera.ops.layout import Channel
from kamera.ops.lowrank import LowRank, floats
from kamera.ops.rope import rotation_table

TILE = 1 << 16
"""Values of a tile per thread: with its buffers it fits a core's second-level cache."""


def write_kv(given: Writing) -> None:
    """`kamera.ops.kernels.serve`."""
    buffers = _Buffers()
    with torch.inference_mode():  # the target may have been made in it
        for c, held, target, low in given.channels():
            if low is None and isinstance(held, torch.Tensor) and not (c.rope and any(given.offset)):
                target.copy_(held)
                continue
            for row in range(target.shape[0]):
                one = None if low is None or not low.ranks[row] else low[row]
                _write(c, target[row], held[row], one, given.offset, buffers)


class _Buffers:
    """Scratch tensors by purpose, shared by all tiles of a call."""

    def __init__(self) -> None:
        self._held: dict[str, torch.Tensor] = {}

    def take(self, name: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Scratch of the shape and device of ``like``."""
        held = self._held.get(name)
        if held is None or held.numel() < like.numel() or held.dtype != dtype or held.device != like.device:
            held = self._held[name] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return held[: like.numel()].view(like.shape)


def _write(
    c: Channel,
    target: torch.Tensor,
    source: Stored,
    factors: LowRank | None,
    offset: tuple[int, ...],
    buffers: _Buffers,
) -> None:
    turned = c.rope if c.rope is not None and c.rope.rotary_dim and any(offset) else None
    if isinstance(source, torch.Tensor) and turned is None and factors is None:
        target.copy_(source)
        return
    source = on_device(source, target.device)
    work = torch.promote_types(value_dtype(source), torch.float32)
    left = right = table = None
    if factors is not None:
        left, right = floats(factors.left), floats(factors.right)
        work = torch.promote_types(work, torch.promote_types(left.dtype, right.dtype))
        left = left.to(target.device, work)
        right = rearrange(right.to(target.device, work), "(heads dim) rank -> heads rank dim", heads=c.heads)
    if turned is not None:
        table = rotation_table(turned, offset, work, target.device)
    for heads, tokens in _tiles(c, target.shape[1]):
        y = target[heads, tokens]
        in_place = y.dtype == work  # the last pass then needs no cast and writes the target itself
        if isinstance(source, torch.Tensor):
            x = source[heads, tokens]
            if x.dtype != work:
                x = buffers.take("wide", y, work).copy_(x)
        else:
            last = in_place and left is None and table is None
            x = y if last else buffers.take("wide", y, work)
            decode_tile(source, heads, tokens.start, tokens.stop, x)
        if left is not None and right is not None:
            if in_place and table is None:
                out = y
            elif isinstance(source, torch.Tensor) and source.dtype == work:
                out = buffers.take("wide", y, work)
            else:
                out = x
            x = _add(x, left[tokens], right[heads], out)
        if table is not None and turned is not None:
            out = y if in_place else buffers.take("turned", y, work)
            rotate_into(x, out, *table, turned.pairing, c.rotary_start)
            x = out
        if x is not y:
            y.copy_(x)


def _tiles(c: Channel, tokens: int) -> Iterator[tuple[slice, slice]]:
    """Heads and tokens of every tile: several whole heads if they are short. Tiles start at even tokens."""
    limit = TILE * torch.get_num_threads()
    long = max(2, limit // max(c.dim, 1) // 2 * 2)
    wide = max(1, limit // max(min(long, tokens) * c.dim, 1))
    for head in range(0, c.heads, wide):
        for start in range(0, tokens, long):
            yield slice(head, min(head + wide, c.heads)), slice(start, min(start + long, tokens))


def _add(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``x + left @ right`` of ``[heads, tokens, dim]``, ``[tokens, m]`` and ``[heads, m, dim]``."""
    if x.shape[0] == 1:
        torch.addmm(x[0], left, right[0], out=out[0])
    else:
        torch.baddbmm(x, left.expand(x.shape[0], -1, -1), right, out=out)
    return out
