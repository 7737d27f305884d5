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

from kamera.ops.kernels.launches import Stored, Writing, on_device, value_dtype
from kamera.ops.layout import Channel
from kamera.ops.lowrank import LowRank, floats
from kamera.ops.quantize import Axis, CodedChannel
from kamera.ops.rope import Pairing, rotation_table


def decode_tile(channel: CodedChannel, heads: slice, start: int, stop: int, out: torch.Tensor) -> None:
    """Write tokens ``start:stop`` of ``heads`` into ``out`` ``[heads, tokens, dim]``, float32 or wider.

    The same numbers as `CodedChannel.dense`, before its cast to the channel's dtype. ``start`` must be
    even: two tokens share a byte of 4-bit codes.
    """
    if channel.grid.bits == 8:
        out.copy_(channel.codes[heads, start:stop])
    else:
        codes = channel.codes[heads, start // 2 : -(-stop // 2)]
        out[:, 0::2].copy_(codes & 15)
        out[:, 1::2].copy_((codes >> 4)[:, : (stop - start) // 2])
    steps, lows = (_spread(channel, t[heads], start, stop) for t in (channel.steps, channel.lows))
    largest = torch.finfo(channel.steps.dtype).max  # the last code may exceed it by a fraction of a step
    out.mul_(steps).add_(lows).clamp_(-largest, largest)


def _spread(channel: CodedChannel, grouped: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Steps or lows of a tile, one per value or broadcasting against it."""
    axis: Axis = channel.axis
    group = channel.grid.group
    if axis == "tokens":
        if not group:
            return grouped
        index = torch.arange(start, stop, device=grouped.device) // group
        return grouped.index_select(1, index)
    grouped = grouped[:, start:stop]
    if not group:
        return grouped
    return grouped.repeat_interleave(group, 2)[:, :, : channel.shape[2]]


def rotate_into(
    x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, pairing: Pairing, start: int
) -> None:
    """Write ``x`` ``[..., dim]`` into ``out``, its features from ``start`` on turned by a table ``[pairs]``.

    ``x``, ``out`` and the table are of one floating dtype; ``x`` and ``out`` share no memory. Features that
    carry no phase are copied. The result equals `kamera.ops.relocate` bit for bit: products are rounded
    before they are added.
    """
    pairs = cos.shape[0]
    stop = start + 2 * pairs
    if start:
        out[..., :start].copy_(x[..., :start])
    if stop < x.shape[-1]:
        out[..., stop:].copy_(x[..., stop:])
    if pairing == "half":
        first, second = x.narrow(-1, start, pairs), x.narrow(-1, start + pairs, pairs)
        left, right = out.narrow(-1, start, pairs), out.narrow(-1, start + pairs, pairs)
    else:
        first, second = x[..., start:stop:2], x[..., start + 1 : stop : 2]
        left, right = out[..., start:stop:2], out[..., start + 1 : stop : 2]
    torch.mul(first, cos, out=left)
    left.sub_(second * sin)
    torch.mul(second, cos, out=right)
    right.add_(first * sin)


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
