"""Rotation of a phase from one tensor into another."""

from __future__ import annotations

import torch

from kamera.ops.rope import Pairing


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
