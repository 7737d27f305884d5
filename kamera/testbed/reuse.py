"""What reuse loses, measured: the deficit of one chunk's KV, and answers read from edited KV.

A small, slow-but-obvious stand-in for Kamera's own operators, so that the testbed's promises can
be checked without them. K and V are `[b, kv_heads, tokens, 64]` per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, Qwen2_5_VLForConditionalGeneration

from .batches import Batch, additive, embed

Layers = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Prefilled:
    """Prefilled chunks of a batch: per layer K and V of `[anchor, chunks]`, and the embeddings."""

    layers: Layers
    embeddings: torch.Tensor


@torch.no_grad()
def prefill(model: Qwen2_5_VLForConditionalGeneration, batch: Batch, mask: torch.Tensor) -> Prefilled:
    """KV of anchor and chunks under `mask` (the questions' rows are not used)."""
    embeddings, end = embed(model, batch), batch.end
    cache = DynamicCache(config=model.config)
    model.model.language_model(
        inputs_embeds=embeddings[:, :end],
        position_ids=batch.positions[:, :, :end].expand(-1, len(batch.episodes), -1),
        attention_mask=additive(mask[:, :, :end, :end]),
        past_key_values=cache,
        use_cache=True,
    )
    layers: list[Any] = cache.layers
    return Prefilled([(layer.keys, layer.values) for layer in layers], embeddings)


@torch.no_grad()
def ask(
    model: Qwen2_5_VLForConditionalGeneration, batch: Batch, layers: Layers, embeddings: torch.Tensor
) -> torch.Tensor:
    """Answer logits `[b, q, vocabulary]` of the batch's questions behind the given KV."""
    cache, end = DynamicCache(config=model.config), batch.end
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    hidden = model.model.language_model(
        inputs_embeds=embeddings[:, end:],
        position_ids=batch.positions[:, :, end:].expand(-1, len(batch.episodes), -1),
        attention_mask=additive(batch.mask[:, :, end:]),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    return model.lm_head(hidden[:, batch.read - end])


def truncate(delta: torch.Tensor, rank: int) -> tuple[torch.Tensor, float]:
    """The best rank-`rank` version of `[b, heads, tokens, d]`, heads side by side, and its energy.

    Keys may be in any one frame: a rotation of the chunk as a whole does not change the rank.
    """
    b, heads, tokens, d = delta.shape
    flat = delta.transpose(1, 2).reshape(b, tokens, heads * d)
    u, s, vh = torch.linalg.svd(flat, full_matrices=False)
    low = (u[..., :rank] * s[:, None, :rank]) @ vh[:, :rank]
    kept = float(s[:, :rank].square().sum() / s.square().sum().clamp_min(1e-30))
    return low.view(b, tokens, heads, d).transpose(1, 2), kept


def patched(blind: Layers, full: Layers, span: tuple[int, int], rank: int) -> tuple[Layers, float]:
    """Blind KV plus the rank-`rank` part of the deficit at `span`, all else from `full`.

    Rank 0 is blind reuse. Also returns the mean share of the deficit's energy that is kept.
    """
    first, last = span
    layers, kept = [], []
    for pair_blind, pair_full in zip(blind, full, strict=True):
        pair = []
        for without, within in zip(pair_blind, pair_full, strict=True):
            here = without[:, :, first:last]
            if rank:
                low, share = truncate(within[:, :, first:last] - here, rank)
                here = here + low
                kept.append(share)
            edited = within.clone()
            edited[:, :, first:last] = here
            pair.append(edited)
        layers.append((pair[0], pair[1]))
    # Layer 0 sees no antecedent, so its deficit is rounding noise.
    channels = kept[2:]
    return layers, sum(channels) / len(channels) if channels else 0.0
