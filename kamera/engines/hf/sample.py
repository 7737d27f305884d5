"""A few tokens of several chunks in one forward, and the completion of all others, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from kamera.content import Encoded
from kamera.engines.base import Sampling
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf.adjacent import joined
from kamera.engines.hf.encode import decoder_arguments, input_device, with_batch
from kamera.engines.hf.model import Model
from kamera.engines.hf.rows import refuse_undivided, refuse_unmaskable, row_masks, take
from kamera.errors import UnsupportedBackbone
from kamera.ops import KV, check_finite, kv_of


def can_sample(model: Model, span: Encoded) -> bool:
    """True if tokens of a span can run apart from the others, beside those of other spans."""
    try:
        refuse_unmaskable(model, span)
        refuse_undivided(span)
    except UnsupportedBackbone:
        return False
    return True


def sample(
    model: Model, parts: Sequence[Sampling], lengths: Sequence[int], past: model_cache.ModelCache
) -> tuple[KV, ...]:
    """As `Engine.sample`, behind ``past``, which holds spans of ``lengths`` tokens and is not written."""
    pieces: list[model_cache.CacheSlice] = []
    standing: list[tuple[int, int, Sampling]] = []
    at = source = 0
    for index in range(parts[-1].at + 1):
        for part in (part for part in parts if part.at == index):
            standing.append((at, part.encoded.num_tokens, part))
            at += 0 if part.completion else part.encoded.num_tokens
        if index < len(lengths):
            pieces.append(model_cache.CacheSlice(at, source, lengths[index]))
            at, source = at + lengths[index], source + lengths[index]
    rows, encoded, positions = [], [], []
    for start, length, part in standing:
        refuse_unmaskable(model, part.encoded)
        chosen = torch.arange(length) if part.completion is None else part.completion.rows
        rows.append(start + chosen)
        encoded.append(take(part.encoded, chosen))
        positions.append(part.positions[:, chosen])
    whole = joined(model, encoded, positions)
    if whole is None:
        raise UnsupportedBackbone(
            f"{type(model.model).__name__} cannot take tokens of these chunks in one call: prefill them"
        )
    places, total = torch.cat(rows), max(start + length for start, length, _ in standing)
    model.limits.check_tokens(torch.cat(positions, dim=1))
    cache = model_cache.CompletingCache(
        past,
        model.layout,
        total,
        [
            piece._replace(length=min(piece.length, total - piece.start))
            for piece in pieces
            if piece.start < total
        ],
        [(start, length, part.completion) for start, length, part in standing],
    )
    arguments = decoder_arguments(whole, input_device(model.model)) | {
        "position_ids": with_batch(torch.cat(positions, dim=1)).to(input_device(model.model)),
        "past_key_values": cache,
        "use_cache": True,
    }
    mask, turn = row_masks(model, places, total), model.turns.turn(alone=True, pauses=model.quiet)
    with torch.no_grad(), turn, suppress(model_cache.AllMade):
        model.decoder(attention_mask=mask, **arguments)
    made = tuple(kv_of(layers, model.groups) for layers in cache.made)
    for kv in made:
        check_finite(kv)
    return made
