"""How much a question looks at every cached token: the attention weights themselves, summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kamera.backbones import cache as model_cache
from kamera.errors import UnsupportedBackbone

if TYPE_CHECKING:
    from kamera.backbones.backbone import Backbone


def attention_mass(
    backbone: Backbone, ids: torch.Tensor, positions: torch.Tensor, past: model_cache.ModelCache
) -> list[torch.Tensor]:
    """Attention of text ``ids`` on what ``past`` holds: per layer ``[held tokens]``, float64.

    Summed over heads and over the tokens of ``ids``, which stand at ``positions`` ``[axes, tokens]``.
    The model runs eagerly for this one forward, which extends ``past``. Raises UnsupportedBackbone
    where a layer hands out no weights.
    """
    held = model_cache.cache_length(past)
    masses: list[torch.Tensor] = [torch.empty(0)] * len(backbone.decoder.layers)

    def watch(index: int) -> Callable[[torch.nn.Module, Any, Any], None]:
        def collect(module: torch.nn.Module, args: Any, output: Any) -> None:
            weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            if weights is None:
                raise UnsupportedBackbone(
                    f"{type(module).__name__} of layer {index} hands out no attention weights: leave "
                    "query-aware arms out for this model"
                )
            masses[index] = weights[0, ..., :held].double().sum((0, 1)).cpu()

        return collect

    handles = []
    for i, layer in enumerate(backbone.decoder.layers):
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            raise UnsupportedBackbone(
                f"{type(layer).__name__} has no self_attn to watch: leave query-aware arms out for this model"
            )
        handles.append(attention.register_forward_hook(watch(i)))
    config = backbone.decoder.config
    before = config._attn_implementation
    try:
        config._attn_implementation = "eager"
        backbone.forward(ids, positions, past)
    finally:
        config._attn_implementation = before
        for handle in handles:
            handle.remove()
    return masses
