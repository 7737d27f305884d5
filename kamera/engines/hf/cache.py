"""The only file that knows the insides of a transformers cache.

Everything else sees `KV` (layers of named channels, ``[heads, tokens, dim]``, batch dropped) and an
opaque cache object to hand to the model. Measured on transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Cache layers of this config that hold something other than attention KV: index -> class name.

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


def read(cache: ModelCache, layout: Layout, start: int = 0, stop: int | None = None, row: int = 0) -> KV:
    """Views of the tokens ``start:stop`` of one sequence of a cache."""
    out: list[LayerKV] = []
    for layer, spec in zip(cache.layers, layout, strict=False):
        tensors = _tensors(layer)
        out.append({c.name: _canonical(tensors[c.tensor], row)[:, start:stop] for c in spec.channels})
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


def growing(config: Any, layout: Layout, room: KV, start: int, stop: int) -> ModelCache:
    """A batch-1 cache of the tokens ``start:stop`` of ``room`` that grows into the room behind them.

    ``room`` holds every layer's channels ``[heads, capacity, dim]``. Appended tokens are written there in
    place; a cache that outgrows the room, or becomes several sequences, continues by concatenation.
    After `detach` it never writes into the room again.
    """
    cache = new_cache(config)
    if start == stop:
        return cache
    for i, (tensors, spec) in enumerate(zip(room, layout, strict=True)):
        while len(cache.layers) <= i:
            cache.layers.append(DynamicLayer())
        if not spec.channels:
            continue
        held: dict[str, torch.Tensor] = {c.tensor: tensors[c.name][None, :, start:] for c in spec.channels}
        kind = _InPlaceIndexed if "indexer_keys" in held else _InPlace
        cache.layers[i] = kind(held, stop - start)
    return cache


def detach(cache: ModelCache) -> None:
    """Detach a cache from the room it grew in: others may write the room then."""
    for layer in cache.layers:
        if isinstance(layer, _InPlace):
            layer.room = None


class _InPlace(DynamicLayer):
    """A layer whose tokens are the first of ``room``; updates write the next ones."""

    def __init__(self, room: dict[str, torch.Tensor], length: int) -> None:
        super().__init__()
        self.lazy_initialization(room["keys"], room["values"])
        self.room: dict[str, torch.Tensor] | None = room
        self.keys = room["keys"][:, :, :length]
        self.values = room["values"][:, :, :length]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of a `DynamicLayer`, without the concatenation while there is room."""
        keys = _written(self.room, "keys", self.keys, key_states)
        values = _written(self.room, "values", self.values, value_states)
        if keys is None or values is None:
            return super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = keys, values
        return keys, values


class _InPlaceIndexed(_InPlace, DynamicIndexedLayer):
    """An `_InPlace` layer with the keys of an indexer."""

    def __init__(self, room: dict[str, torch.Tensor], length: int) -> None:
        super().__init__(room, length)
        self.lazy_initialization_indexer(room["indexer_keys"])
        self.indexer_keys = room["indexer_keys"][0, :, :length]

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """As of a `DynamicIndexedLayer`, without the concatenation while there is room."""
        assert self.indexer_keys is not None
        held = self.indexer_keys[:, None]
        keys = _written(self.room, "indexer_keys", held, indexer_key_states[:, None])
        if keys is None:
            return super().update_indexer(indexer_key_states)
        self.indexer_keys = keys[:, 0]
        return self.indexer_keys


def _written(
    rooms: dict[str, torch.Tensor] | None, name: str, held: torch.Tensor | None, new: torch.Tensor
) -> torch.Tensor | None:
    """``held`` with ``new`` behind it in the room, or None if it is not there or does not fit."""
    if rooms is None or held is None:
        return None
    room = rooms[name]
    stop = held.shape[2] + new.shape[2]
    # beam search and several sequences leave the room: they have other tensors
    if new.shape[0] != 1 or held.data_ptr() != room.data_ptr() or stop > room.shape[2]:
        return None
    room[:, :, held.shape[2] : stop] = new
    return room[:, :, :stop]


def share(cache: ModelCache, config: Any, layout: Layout) -> ModelCache:
    """A second cache over the same tensors: appending to it does not change ``cache``."""
    if cache_length(cache) == 0:  # planned layers hold no tensors yet
        return new_cache(config)
    return build(config, layout, read(cache, layout))


def repeat(cache: ModelCache, times: int) -> ModelCache:
    """The cache with its batch repeated ``times`` (beam search, several return sequences)."""
    if times > 1 and cache_length(cache):
        cache.batch_repeat_interleave(times)
    return cache


def spread(cache: ModelCache, rows: int) -> ModelCache:
    """The cache as ``rows`` equal sequences, in place; tensors are shared until the model appends."""
    for layer in cache.layers:
        for name, tensor in _tensors(layer).items():
            setattr(layer, name, tensor.expand(rows, *tensor.shape[1:]))
    return cache


Choose = Callable[[int, LayerKV, LayerKV], torch.Tensor]
"""(layer, fresh KV of the rows that run, KV held there) -> indices of the rows to write."""


class OverwritingCache(DynamicCache):
    """A cache in which computed KV overwrites held tokens, instead of being appended to them.

    Takes over ``held``, whose tensors are written in place and must not be in use elsewhere. The rows of a
    forward are at ``places`` (int64 ``[rows]``, indices into the held tokens). At every layer ``choose``
    selects the rows that are written; the others leave the held tokens unchanged.
    """

    def __init__(self, held: ModelCache, layout: Layout, places: torch.Tensor, choose: Choose) -> None:
        super().__init__()
        self.layers = held.layers
        self._layout, self._places, self._choose = layout, places, choose
        self._chosen: dict[int, torch.Tensor] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the chosen rows of layer ``layer_idx``; returns all it holds."""
        layer: Any = self.layers[layer_idx]
        places = self._places.to(layer.keys.device)
        held = {"keys": layer.keys, "values": layer.values}
        new = {"keys": key_states, "values": value_states}
        named = {c.name: c.tensor for c in self._layout[layer_idx].channels if c.tensor in held}
        chosen = self._choose(
            layer_idx,
            {name: new[t][0] for name, t in named.items()},
            {name: held[t][0].index_select(1, places) for name, t in named.items()},
        ).to(places.device)
        self._chosen[layer_idx] = chosen
        for name, tensor in held.items():
            tensor[:, :, places[chosen]] = new[name][:, :, chosen]
        return layer.keys, layer.values

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Write the rows `update` chose in this layer; returns all indexer keys."""
        layer: Any = self.layers[layer_idx]
        chosen = self._chosen[layer_idx]
        layer.indexer_keys[:, self._places.to(chosen.device)[chosen]] = indexer_key_states[:, chosen]
        keys: torch.Tensor = layer.indexer_keys
        return keys


def _tensors(layer: Any) -> dict[str, torch.Tensor]:
    if isinstance(layer, DummyLayer) or getattr(layer, "keys", None) is None:
        return {}
    held = {"keys": layer.keys, "values": layer.values}
    if getattr(layer, "indexer_keys", None) is not None:
        held["indexer_keys"] = layer.indexer_keys
    return held


def _canonical(tensor: torch.Tensor, row: int) -> torch.Tensor:
    """``[rows, heads, tokens, dim]`` or the indexer's ``[rows, tokens, dim]`` to ``[heads, tokens, dim]``."""
    return tensor[row : row + 1] if tensor.dim() == 3 else tensor[row]


def layer_devices(cache: ModelCache) -> Sequence[torch.device | None]:
    """Device of each layer's KV (None for a layer without); differs under ``device_map``."""
    return [next((t.device for t in _tensors(layer).values()), None) for layer in cache.layers]
