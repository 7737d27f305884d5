"""Adjacent spans in one forward: KV is causal, so a run of spans is one span, its KV split at the borders."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from kamera.content import Encoded
from kamera.engines.hf.encode import SEEN, is_flat, text_tensors
from kamera.engines.hf.model import Model
from kamera.ops import KV, kv_copy, kv_slice


def joined(model: Model, spans: Sequence[Encoded], positions: Sequence[torch.Tensor]) -> Encoded | None:
    """Spans that follow each other as one; None if the decoder cannot take them in one call.

    ``positions`` ``[axes, tokens]`` of each. Text beside pictures is embedded as the outer model does it,
    without a forward of the decoder. None for a model that makes its mask from token types, and for an
    argument of the decoder that has no entry per token.
    """
    ids = torch.cat([span.input_ids for span in spans])
    if not any(span.tensors for span in spans):
        return Encoded(ids, {}, {})
    if not model.facts.joins:
        return None
    with torch.no_grad(), model.turns.alone():  # texts as the outer model gives them beside pictures
        rows = [
            span.tensors or text_tensors(model.model, model.door, span.input_ids, places)
            for span, places in zip(spans, positions, strict=True)
        ]
    names = dict.fromkeys(name for row in rows for name in row)
    like = {name: tensor for row in rows for name, tensor in row.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if is_flat(name):
            tensors[name] = torch.cat([row[name] for row in rows if name in row])
            continue
        parts = []
        for span, row in zip(spans, rows, strict=True):
            part = row.get(name)
            if part is None and (name == SEEN or name.endswith("token_type_ids")):
                part = torch.zeros(1, span.num_tokens, dtype=like[name].dtype)  # text
            if part is None or part.dim() < 2 or part.shape[:2] != (1, span.num_tokens):
                return None
            parts.append(part)
        device = parts[0].device
        tensors[name] = torch.cat([part.to(device) for part in parts], dim=1)
    return Encoded(ids, {}, tensors)


def split(kv: KV, lengths: Sequence[int]) -> tuple[KV, ...]:
    """Copies of consecutive spans of ``lengths`` tokens out of the KV of all."""
    stops = list(accumulate(lengths))
    starts = [0, *stops[:-1]]
    return tuple(kv_copy(kv_slice(kv, a, b)) for a, b in zip(starts, stops, strict=True))
