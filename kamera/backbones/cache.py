"""The one file that knows the insides of a transformers cache.

Everything else sees `KV` (layers of named channels, ``[heads, tokens, dim]``, batch dropped) and an
opaque cache object to hand to the model. Measured on transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from kamera.ops import KV, LayerKV, Layout, kv_tokens

ModelCache = DynamicCache

_RELOCATABLE = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer)


def foreign_layers(config: Any) -> dict[int, str]:
    """Cache layers of this config that hold something else than attention KV: index -> class name.

    Recurrent and convolution states cannot be cut out of a sequence and put elsewhere.
    """
    layers = DynamicCache(config=config).layers
    return {i: type(layer).__name__ for i, layer in enumerate(layers) if type(layer) not in _RELOCATABLE}


def new_cache(config: Any) -> ModelCache:
    """An empty cache that keeps every token.

    Sliding-window layers get a full cache too: a layer that drops tokens past its window would cut
    off the canonical of a long chunk. Outputs are the same, the model's mask does the sliding.
    """
    planned = DynamicCache(config=config)
    if any(isinstance(layer, DynamicIndexedLayer | DummyLayer) for layer in planned.layers):
        for i, layer in enumerate(planned.layers):
            if isinstance(layer, DynamicSlidingWindowLayer):
                planned.layers[i] = DynamicLayer()
        return planned
    return DynamicCache()


def cache_length(cache: ModelCache) -> int:
    """Tokens held."""
    return int(cache.get_seq_length())


def raw_shapes(cache: ModelCache) -> list[dict[str, torch.Size]]:
    """Shape of every tensor each layer holds, by attribute name; empty for a layer without KV."""
    return [{name: tensor.shape for name, tensor in _tensors(layer).items()} for layer in cache.layers]


def read(cache: ModelCache, layout: Layout, start: int = 0, stop: int | None = None) -> KV:
    """Views of the tokens ``start:stop`` of a batch-1 cache."""
    out: list[LayerKV] = []
    for layer, spec in zip(cache.layers, layout, strict=False):
        tensors = _tensors(layer)
        out.append({c.name: _canonical(tensors[c.tensor])[:, start:stop] for c in spec.channels})
    out.extend({} for _ in layout[len(out) :])
    return tuple(out)


def build(config: Any, layout: Layout, kv: KV) -> ModelCache:
    """A batch-1 cache holding ``kv``. Tensors are shared; the model's updates never write into them."""
    cache = new_cache(config)
    if kv_tokens(kv) == 0:
        return cache
    for i, (tensors, spec) in enumerate(zip(kv, layout, strict=True)):
        while len(cache.layers) <= i:
            cache.layers.append(DynamicLayer())
        if not spec.channels:
            continue
        layer: Any = cache.layers[i]
        held = {c.tensor: tensors[c.name].unsqueeze(0) for c in spec.channels}
        layer.lazy_initialization(held["keys"], held["values"])
        layer.keys, layer.values = held["keys"], held["values"]
        if "indexer_keys" in held:
            index = held["indexer_keys"].squeeze(1)
            layer.lazy_initialization_indexer(index)
            layer.indexer_keys = index
    return cache


def share(cache: ModelCache, config: Any, layout: Layout) -> ModelCache:
    """A second cache over the same tensors: what the model appends to it leaves ``cache`` as it is."""
    if cache_length(cache) == 0:  # planned layers hold no tensors yet
        return new_cache(config)
    return build(config, layout, read(cache, layout))


def repeat(cache: ModelCache, times: int) -> ModelCache:
    """The cache with its batch repeated ``times`` (beam search, several return sequences)."""
    if times > 1 and cache_length(cache):
        cache.batch_repeat_interleave(times)
    return cache


def _tensors(layer: Any) -> dict[str, torch.Tensor]:
    if isinstance(layer, DummyLayer) or getattr(layer, "keys", None) is None:
        return {}
    held = {"keys": layer.keys, "values": layer.values}
    if getattr(layer, "indexer_keys", None) is not None:
        held["indexer_keys"] = layer.indexer_keys
    return held


def _canonical(tensor: torch.Tensor) -> torch.Tensor:
    """``[1, heads, tokens, dim]`` or the indexer's ``[1, tokens, dim]`` to ``[heads, tokens, dim]``."""
    return tensor if tensor.dim() == 3 else tensor[0]


def layer_devices(cache: ModelCache) -> Sequence[torch.device | None]:
    """Device of each layer's KV (None for a layer without); differs under ``device_map``."""
    return [next((t.device for t in _tensors(layer).values()), None) for layer in cache.layers]
