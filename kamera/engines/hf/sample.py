"""A few tokens of several chunks in one forward, and the completion of all others, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from kamera.content import Encoded
from kamera.engines.base import Sampling
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf.encode import SEEN, input_device, is_flat
from kamera.engines.hf.forwards import join_spans, run_decoder
from kamera.engines.hf.model import Model
from kamera.errors import UnsupportedBackbone
from kamera.ops import KV, check_finite, kv_of


def can_sample(model: Model, span: Encoded) -> bool:
    """True if tokens of a span can run apart from the others, beside those of other spans."""
    try:
        refuse_undivided(model, span)
    except UnsupportedBackbone:
        return False
    return True


def sample(
    model: Model, parts: Sequence[Sampling], lengths: Sequence[int], past: model_cache.ModelCache
) -> tuple[KV, ...]:
    """As `Engine.sample`, behind ``past``, which holds spans of ``lengths`` tokens and is not written."""
    pieces: list[model_cache.CacheSlice] = []
    placements: list[tuple[int, int, Sampling]] = []
    at = source = 0
    for index in range(parts[-1].at + 1):
        for part in (part for part in parts if part.at == index):
            placements.append((at, part.encoded.num_tokens, part))
            at += 0 if part.completion else part.encoded.num_tokens
        if index < len(lengths):
            pieces.append(model_cache.CacheSlice(at, source, lengths[index]))
            at, source = at + lengths[index], source + lengths[index]
    rows, encoded, positions = [], [], []
    for start, length, part in placements:
        refuse_undivided(model, part.encoded)
        part_rows = torch.arange(length) if part.completion is None else part.completion.rows
        rows.append(start + part_rows)
        encoded.append(encoding_rows(part.encoded, part_rows))
        positions.append(part.positions[:, part_rows])
    whole = join_spans(model, encoded, positions)
    if whole is None:
        raise UnsupportedBackbone(
            f"{type(model.model).__name__} cannot take tokens of these chunks in one call: prefill them"
        )
    places, total = torch.cat(rows), max(start + length for start, length, _ in placements)
    visible_pieces = [p._replace(length=min(p.length, total - p.start)) for p in pieces if p.start < total]
    chunks = [(start, length, part.completion) for start, length, part in placements]
    cache = model_cache.CompletingCache(past, model.layout, total, visible_pieces, chunks)
    with suppress(model_cache.AllMade):
        run_decoder(
            model, [whole], torch.cat(positions, dim=1)[:, None], cache, row_masks(model, places, total)
        )
    kvs = tuple(kv_of(layers, model.groups) for layers in cache.kvs)
    for kv in kvs:
        check_finite(kv)
    return kvs


def refuse_undivided(model: Model, encoded: Encoded) -> None:
    """Raise UnsupportedBackbone if a token cannot be run apart from the tokens after it."""
    name, count = type(model.model).__name__, encoded.num_tokens
    attention = getattr(model.decoder.config, "_attn_implementation", None)
    if attention not in ("eager", "sdpa"):
        raise UnsupportedBackbone(
            f"{name} attends with {attention!r}, which takes no additive mask: load it with "
            'attn_implementation="sdpa" or "eager" to recompute single tokens'
        )
    if encoded.tensors and not model.facts.joins:
        raise UnsupportedBackbone(
            f"{name} lets the tokens of a picture see each other: a few of them cannot be recomputed "
            "apart; recompute the whole chunk (prefill)"
        )
    for argument, tensor in encoded.tensors.items():
        by_picture = is_flat(argument) and SEEN in encoded.tensors
        if not by_picture and not (tensor.dim() >= 2 and tensor.shape[:2] == (1, count)):
            raise UnsupportedBackbone(
                f"the decoder takes {argument} of shape {tuple(tensor.shape)}, which has no entry per token "
                f"of {count}: single tokens of this chunk cannot be recomputed"
            )


def encoding_rows(encoded: Encoded, rows: torch.Tensor) -> Encoded:
    """The rows' share of an encoding that divides into tokens."""
    tensors: dict[str, torch.Tensor] = {}
    picture_mask = encoded.tensors.get(SEEN)
    for name, tensor in encoded.tensors.items():
        if is_flat(name) and picture_mask is not None:
            # one row per picture token: find the chosen ones among them
            is_picture = picture_mask.reshape(-1).cpu().bool()
            picture_rows = (is_picture.cumsum(0) - 1)[rows][is_picture[rows]]
            tensors[name] = tensor[picture_rows.to(tensor.device)]
        else:
            tensors[name] = tensor[:, rows.to(tensor.device)]
    return Encoded(encoded.input_ids[rows], {}, tensors)


def row_masks(model: Model, places: torch.Tensor, total: int) -> torch.Tensor | dict[str, torch.Tensor]:
    """The additive mask of rows at ``places`` over ``total`` tokens; by type for layers of several types.

    Additive, in the model's dtype: eager attention would add a boolean one as zeros and ones.
    """
    dtype = next(p.dtype for p in model.model.parameters() if p.is_floating_point())
    key, query = torch.arange(total)[None], places[:, None]

    def additive(is_visible: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(is_visible.shape, dtype=dtype).masked_fill(~is_visible, torch.finfo(dtype).min)
        return mask[None, None].to(input_device(model.model))

    causal, window = key <= query, getattr(model.config, "sliding_window", None)
    kinds = set(getattr(model.config, "layer_types", None) or ["sliding_attention"])
    if window is None or "sliding_attention" not in kinds:
        return additive(causal)
    narrow = additive(causal & (key > query - window))
    return (
        narrow if len(kinds) == 1 else dict.fromkeys(kinds, additive(causal)) | {"sliding_attention": narrow}
    )
