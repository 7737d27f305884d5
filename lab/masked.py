"""A prefill that may not see a part of the cache: the 4-D mask oracle of reuse.

The mask is additive in the model's dtype: a boolean one is added as zeros and ones by eager attention,
which is silently wrong.
"""

from __future__ import annotations

import inspect

import torch

from kamera.content import Encoded
from kamera.engines.hf import HfEngine
from kamera.engines.hf.cache import cache_length, read
from kamera.engines.hf.encode import decoder_arguments, with_batch
from kamera.engines.hf.model import ModelCache
from kamera.errors import UnsupportedBackbone
from kamera.ops import KV


def prefill_hiding(
    backbone: HfEngine,
    encoded: Encoded,
    positions: torch.Tensor,
    past: ModelCache,
    start: int,
    stop: int,
) -> KV:
    """KV of a span at ``positions`` ``[axes, tokens]`` behind ``past``, blind to its tokens ``start:stop``.

    Extends ``past`` in place. Raises UnsupportedBackbone if one mask cannot hold for every layer (past
    a sliding window, or with pictures that see their own later tokens), or if the model reads none.
    """
    backbone.limits.check_tokens(positions)
    held, tokens = cache_length(past), encoded.num_tokens
    _refuse(backbone, encoded, held + tokens)
    dtype = next(p.dtype for p in backbone.model.parameters() if p.is_floating_point())
    lowest = torch.finfo(dtype).min
    mask = torch.full((tokens, held + tokens), lowest, dtype=dtype).triu(held + 1)
    mask[:, start:stop] = lowest
    arguments = decoder_arguments(encoded, backbone.model.device) | {
        "position_ids": with_batch(positions).to(backbone.model.device),
        "attention_mask": mask[None, None].to(backbone.model.device),
        "past_key_values": past,
        "use_cache": True,
    }
    with torch.no_grad(), backbone.turns.alone():
        backbone.decoder(**arguments)
    return read(past, backbone.layout, backbone.groups, held)


def _refuse(backbone: HfEngine, encoded: Encoded, total: int) -> None:
    name = type(backbone.model).__name__
    if "attention_mask" not in inspect.signature(backbone.decoder.forward).parameters:
        raise UnsupportedBackbone(
            f"the decoder of {name} takes no attention_mask: leave the mask oracle out for this model"
        )
    if encoded.tensors and not backbone.facts.joins:
        raise UnsupportedBackbone(
            f"{name} lets the tokens of a picture see each other, which one causal mask cannot say: "
            "leave the mask oracle out for this model"
        )
    window = getattr(backbone.config, "sliding_window", None)
    kinds = getattr(backbone.config, "layer_types", None) or []
    slides = any("sliding" in kind for kind in kinds) if kinds else window is not None
    if slides and window is not None and total > window:
        raise UnsupportedBackbone(
            f"{name} attends through a sliding window of {window} tokens and this one holds {total}: "
            "leave the mask oracle out, or ask about a shorter window"
        )
