"""The attention of a question on every cached token: the attention weights themselves, summed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kamera.engines.hf import HfEngine
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf.encode import with_batch
from kamera.errors import UnsupportedBackbone
from lab.hooks import ThreadHook


def attention_mass(
    backbone: HfEngine, ids: torch.Tensor, positions: torch.Tensor, past: model_cache.ModelCache
) -> list[torch.Tensor]:
    """Attention of text ``ids`` on the tokens of ``past``: per layer ``[held tokens]``, float64.

    Summed over heads and over the tokens of ``ids``, which are at ``positions`` ``[axes, tokens]``.
    An eager twin of the decoder runs this one forward, which extends ``past``. Raises
    UnsupportedBackbone if a layer returns no weights.
    """
    backbone.limits.check_tokens(positions)
    held = model_cache.cache_length(past)
    masses: list[torch.Tensor] = [torch.empty(0)] * len(backbone.decoder.layers)

    def watch(index: int) -> Callable[[nn.Module, Any, Any], None]:
        def collect(module: nn.Module, args: Any, output: Any) -> None:
            weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            if weights is None:
                raise UnsupportedBackbone(
                    f"{type(module).__name__} of layer {index} hands out no attention weights: leave "
                    "query-aware arms out for this model"
                )
            masses[index] = weights[0, ..., :held].double().sum((0, 1)).cpu()

        return collect

    twin: Any = eager_twin(backbone.decoder)
    for i, layer in enumerate(twin.layers):
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            raise UnsupportedBackbone(
                f"{type(layer).__name__} has no self_attn to watch: leave query-aware arms out for this model"
            )
        attention.register_forward_hook(ThreadHook(watch(i)))
    with torch.no_grad(), backbone.turns.alone():
        twin(
            input_ids=ids[None].to(backbone.model.device),
            position_ids=with_batch(positions).to(backbone.model.device),
            past_key_values=past,
            use_cache=True,
        )
    return masses


def eager_twin(decoder: nn.Module) -> nn.Module:
    """The same modules over the same tensors, but attending eagerly, with hooks of their own.

    A switch on a live model acts on every thread that runs it; a twin belongs to its caller alone.
    """
    config = copy.copy(decoder.config)  # type: ignore[arg-type]
    config._attn_implementation = "eager"  # type: ignore[union-attr]
    twins: dict[int, nn.Module] = {}

    def twin(module: nn.Module) -> nn.Module:
        if id(module) not in twins:
            made = twins[id(module)] = copy.copy(module)
            vars(made).update(
                _modules={n: m if m is None else twin(m) for n, m in module._modules.items()},
                _forward_hooks=copy.copy(module._forward_hooks),
                _forward_pre_hooks=copy.copy(module._forward_pre_hooks),
            )
            if getattr(made, "config", None) is decoder.config:
                made.config = config
        return twins[id(module)]

    return twin(decoder)
