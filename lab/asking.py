"""Many questions behind one cache in one forward, side by side in one row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kamera.engines.hf import HfEngine
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf.encode import with_batch
from kamera.errors import UnsupportedBackbone


def ask_side_by_side(
    backbone: HfEngine,
    questions: Sequence[torch.Tensor],
    positions: Sequence[torch.Tensor],
    past: model_cache.ModelCache,
) -> torch.Tensor:
    """Next-token logits ``[questions, vocabulary]`` after each question behind ``past``.

    Questions are text token ids ``[tokens]`` at ``positions`` ``[axes, tokens]``; each sees ``past`` and
    itself, so the result is that of as many single forwards, to rounding, but ``past`` is read once
    instead of copied for each. ``past`` is extended and must not be used again. Raises
    UnsupportedBackbone if the model takes no custom mask, or if some layers see less than all of
    ``past``.
    """
    attention = getattr(backbone.decoder.config, "_attn_implementation", None)
    if attention not in ("eager", "sdpa") or getattr(backbone.config, "sliding_window", None) is not None:
        raise UnsupportedBackbone(
            f"{type(backbone.model).__name__} takes no mask that sets questions apart (attention "
            f"{attention!r}, or sliding layers): ask with kamera.engines.hf.forwards.forward_batch"
        )
    places = torch.cat(list(positions), dim=1)
    backbone.limits.check_tokens(places)
    lengths = torch.tensor([q.shape[0] for q in questions])
    owner = torch.arange(len(questions)).repeat_interleave(lengths)
    asked = owner.numel()
    held = model_cache.cache_length(past)
    among = (owner[:, None] == owner[None]).tril()
    seen = torch.cat([torch.ones(asked, held, dtype=torch.bool), among], dim=1)
    dtype = next(p.dtype for p in backbone.model.parameters() if p.is_floating_point())
    # additive: eager attention would add a boolean mask as zeros and ones
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    with torch.no_grad(), backbone.turns.alone():
        out = backbone.model(
            input_ids=torch.cat(list(questions))[None].to(backbone.model.device),
            position_ids=with_batch(places).to(backbone.model.device),
            attention_mask=mask[None, None].to(backbone.model.device),
            past_key_values=past,
            use_cache=True,
            logits_to_keep=(lengths.cumsum(0) - 1).to(backbone.model.device),
        )
    logits: torch.Tensor = out.logits[0]
    return logits
