"""Attention over a packed window and its rows without a mask: every row reads what it sees, and no more.

Equal to masked attention over the whole batch, to rounding; it costs what is visible, about a fifth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface

NAME = "testbed_rows"


@dataclass(frozen=True)
class Block:
    """`count` rows of `length` tokens from token `first` on; they see the window's tokens in `sees`."""

    first: int
    count: int
    length: int
    sees: tuple[slice, ...]

    @property
    def stop(self) -> int:
        """The token after the last row."""
        return self.first + self.count * self.length


@dataclass(frozen=True)
class Shape:
    """A batch: `end` tokens of window, causal, then rows."""

    end: int
    blocks: tuple[Block, ...]


class RowAttention:
    """What a decoder whose attention is called `NAME` runs, for the shape that is set."""

    def __init__(self, text: Any) -> None:
        self.shape: Shape | None = None
        AttentionInterface.register(NAME, self)
        text.config._attn_implementation = NAME

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """As every attention of transformers: `[b, heads, s, d]` to `[b, s, heads, d]`."""
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self.shape is None:
            out = F.scaled_dot_product_attention(
                query, key, value, attention_mask, scale=scale, enable_gqa=True
            )
            return out.transpose(1, 2), None
        end = self.shape.end
        parts = [
            F.scaled_dot_product_attention(
                query[:, :, :end],
                key[:, :, :end],
                value[:, :, :end],
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )
        ]
        parts += [_rows(block, query * scale, key, value) for block in self.shape.blocks]
        return torch.cat(parts, 2).transpose(1, 2), None


def _rows(block: Block, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`[b, heads, rows * length, d]` of one block."""
    batch, heads = query.shape[:2]
    kv = key.shape[1]
    at = slice(block.first, block.stop)
    count, length, group = block.count, block.length, heads // kv
    asks = query[:, :, at].reshape(batch, kv, group * count * length, -1)
    seen_keys = torch.cat([key[:, :, part] for part in block.sees], 2)
    seen_values = torch.cat([value[:, :, part] for part in block.sees], 2)
    far = asks @ seen_keys.mT
    own_keys = key[:, :, at].reshape(batch, kv, 1, count, length, -1)
    own_values = value[:, :, at].reshape(batch, kv, 1, count, length, -1)
    near = asks.reshape(batch, kv, group, count, length, -1) @ own_keys.mT
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    near = near.masked_fill(later, -torch.inf).reshape(batch, kv, group * count * length, length)
    weights = torch.cat([far, near], -1).softmax(-1)
    seen = far.shape[-1]
    out = weights[..., :seen] @ seen_values
    mine = weights[..., seen:].reshape(batch, kv, group, count, length, length) @ own_values
    return (out + mine.reshape(out.shape)).reshape(batch, heads, count * length, -1)
