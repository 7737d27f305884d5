"""Codes of a stored channel, decoded tile by tile into an existing buffer."""

from __future__ import annotations

import torch

from kamera.ops.quantize_kv import Axis, CodedChannel


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
