"""Several spans of one form in one forward, each behind its own copy of the same past.

Rows do not see each other. A row's KV may differ in bits from that of a forward of its own: it depends on
the machine's matrix kernels, which are chosen by shape. A caller that needs equal bits must check
(`kamera.compile`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from kamera.content import Encoded
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import encode as encoding
from kamera.engines.hf.model import Model, ModelCache
from kamera.ops import KV, check_finite


def form(model: Model, span: Encoded) -> Hashable | None:
    """A key, equal for spans that may share a forward: same tensors of same shapes. None for others.

    Three kinds run alone: spans whose mask the outer model makes, those with an argument that is not one
    row long, and all spans of a decoder with experts, since the number of tokens an expert gets, and so its
    arithmetic, depends on the other rows.
    """
    if model.routes or (not model.facts.joins and span.tensors):
        return None
    if any(t.dim() < 2 or (t.shape[0] != 1 and not encoding.is_flat(n)) for n, t in span.tensors.items()):
        return None
    shapes = sorted((n, tuple(t.shape), str(t.dtype)) for n, t in span.tensors.items())
    return (span.num_tokens, *shapes)


def prefill(
    model: Model, spans: Sequence[Encoded], positions: Sequence[torch.Tensor], past: ModelCache
) -> tuple[KV, ...]:
    """KV of each span at its positions ``[axes, tokens]`` behind ``past``, in one batch.

    ``past`` must not be used again. Raises ValueError for spans that do not share a `form`, NonFiniteKV.
    """
    if not spans or len({form(model, span) for span in spans}) > 1 or form(model, spans[0]) is None:
        raise ValueError(f"{len(spans)} spans of different forms cannot share a forward: prefill them alone")
    for places in positions:
        model.limits.check_tokens(places)
    model_cache.detach(past)  # the caller owns what is returned, of one span too
    cache = model_cache.spread(past, len(spans))
    start = model_cache.cache_length(cache)
    rows = [encoding.decoder_arguments(span, encoding.input_device(model.model)) for span in spans]
    arguments: dict[str, Any] = {name: _stack([row[name] for row in rows]) for name in rows[0]}
    arguments["position_ids"] = torch.cat([encoding.with_batch(p) for p in positions], dim=-2).to(
        encoding.input_device(model.model)
    )
    with torch.no_grad(), model.turns.alone():
        model.decoder(**arguments, past_key_values=cache, use_cache=True)
    rows_kv = tuple(
        model_cache.read(cache, model.layout, model.groups, start, row=i) for i in range(len(spans))
    )
    for kv in rows_kv:
        check_finite(kv)
    return rows_kv


def _stack(rows: Sequence[Any]) -> Any:
    """One argument of all rows; of a list of tensors, item by item."""
    if isinstance(rows[0], list):
        return [torch.cat(items) for items in zip(*rows, strict=True)]
    return torch.cat(list(rows))
