"""The only file that knows the insides of a transformers cache.

Everything else sees `KV` (blocks of named channels, batch dropped) and an opaque cache object to hand to the
model. Measured on transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_not
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from kamera.ops import KV, NO_KV, Blocks, CacheTensor, Groups, Layout, kv_slice

ModelCache = DynamicCache

Rows = dict[CacheTensor, tuple[torch.Tensor, ...]]
"""The tensors of a group of layers, one a layer, ``[1, heads, tokens, dim]``."""

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
    cache = DynamicCache(config=config)
    if {type(layer) for layer in cache.layers} & {DynamicIndexedLayer, DummyLayer}:
        for i, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicSlidingWindowLayer):
                cache.layers[i] = DynamicLayer()
        return cache
    return DynamicCache()


def cache_length(cache: ModelCache) -> int:
    """Tokens held."""
    return int(cache.get_seq_length())


def raw_shapes(cache: ModelCache) -> list[dict[str, torch.Size]]:
    """Shape of every tensor each layer holds, by attribute name; empty for a layer without KV."""
    return [{name: tensor.shape for name, tensor in _tensors(layer).items()} for layer in cache.layers]


def read(
    cache: ModelCache, layout: Layout, groups: Groups, start: int = 0, stop: int | None = None, row: int = 0
) -> KV:
    """The tokens ``start:stop`` of one sequence of a cache, for reading.

    Views of the room in which a cache grew (`growing_cache`), else a copy.
    """
    if isinstance(cache, _Growing) and is_in_room(cache):
        first, length = cache.first, cache_length(cache)
        return kv_slice(cache.whole, first + start, first + (length if stop is None else min(stop, length)))
    blocks: list[dict[str, torch.Tensor]] = []
    for layers in groups:
        block: dict[str, torch.Tensor] = {}
        for c in layout[layers[0]].channels:
            rows = [_tokens_of(cache.layers[i], c.tensor, start, stop, row) for i in layers]
            block[c.name] = torch.stack(rows)
        blocks.append(block)
    return Blocks(blocks, groups)


def is_in_room(cache: ModelCache) -> bool:
    """True if all tokens of a cache stand in the room in which it grew, and nobody else writes there."""
    if not isinstance(cache, _Growing) or cache.whole is NO_KV:
        return False
    for layer in cache.kv_layers:  # of each forward: no call a layer
        for tensor in layer.tensors.values():
            if not isinstance(tensor, _Grown) or tensor.rest is not None:
                return False
    return True


def growing_cache(config: Any, layout: Layout, room: KV, start: int, stop: int, end: int) -> ModelCache:
    """A batch-1 cache of the tokens ``start:stop`` of ``room`` that grows into the room behind them.

    ``room`` holds the channels of all layers ``[layers, heads, capacity, dim]``. Tokens that are appended are
    written there in place up to ``end``; others are kept apart, and joined with those of the room for one
    layer at a time. A cache that becomes several sequences leaves the room. After `detach` it never writes
    into the room again.
    """
    empty = new_cache(config)
    if start == stop:
        return empty
    cache = _Growing(room, start)
    cache.layers = empty.layers
    cache.layers.extend([DynamicLayer() for _ in range(len(layout) - len(empty.layers))])
    for block, layers in zip(room.parts, room.groups, strict=True):
        channels = layout[layers[0]].channels
        if not channels:
            continue
        rows: Rows = {c.tensor: block[c.name][:, None, :, start:end].unbind(0) for c in channels}
        if "indexer_keys" in rows:
            rows["indexer_keys"] = tuple([tensor[0] for tensor in rows["indexer_keys"]])
        kind = _InPlaceIndexed if "indexer_keys" in rows else _InPlace
        first = kind(dict(zip(rows, next(zip(*rows.values(), strict=True)), strict=True)))
        for layer, *rooms in zip(layers, *rows.values(), strict=True):
            cache.layers[layer] = room_layer = first.twin()
            cache.kv_layers.append(room_layer)
            for name, tensor in zip(rows, rooms, strict=True):
                room_layer.tensors[name] = _Grown(tensor, stop - start)
    return cache


def detach(cache: ModelCache) -> None:
    """Detach a cache from the room it grew in: others may write the room behind its tokens then."""
    if isinstance(cache, _Growing):
        cache.whole = NO_KV
        for layer in cache.kv_layers:
            for tensor in layer.tensors.values():
                if isinstance(tensor, _Grown):
                    tensor.room = tensor.room.narrow(-2, 0, tensor.length)


class _Growing(DynamicCache):
    """A cache whose tokens stand in ``whole`` from ``first`` on, as long as each layer is in its room."""

    def __init__(self, whole: KV, first: int) -> None:
        super().__init__()
        self.whole, self.first = whole, first
        self.kv_layers: list[_InPlace] = []  # the layers that keep KV


class _Grown:
    """The tokens of one tensor: the first ``length`` of its ``room``, and the rest, which found no place.

    Tokens are the dimension before the last. ``room`` ends where it may be written; ``rest`` is None while
    all tokens stand in it.
    """

    def __init__(self, room: torch.Tensor, length: int) -> None:
        self.room, self.length = room, length
        self.rest: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Their number."""
        return self.length + (0 if self.rest is None else self.rest.shape[-2])

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """All tokens, ``new`` ones behind the others."""
        stop = self.length + new.shape[-2]
        if self.rest is None and stop <= self.room.shape[-2]:
            self.room.narrow(-2, self.length, new.shape[-2]).copy_(new)
            self.length = stop
            return self.room.narrow(-2, 0, stop)  # each layer and token comes here
        self.rest = new.clone() if self.rest is None else torch.cat([self.rest, new], dim=-2)
        return torch.cat([self.room.narrow(-2, 0, self.length), self.rest], dim=-2)

    def span(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Tokens ``start:stop``: a view where they stand in one place, else a copy."""
        length, rest = self.length, self.rest
        if rest is None or (stop is not None and stop <= length):
            return self.room[..., start : length if stop is None else min(stop, length), :]
        last = rest.shape[-2] if stop is None else stop - length
        if start >= length:
            return rest[..., start - length : last, :]
        return torch.cat([self.room[..., start:length, :], rest[..., :last, :]], dim=-2)

    def crop(self, tokens: int) -> None:
        """Drop all behind the first ``tokens``."""
        if self.rest is not None:
            self.rest = self.rest[..., : tokens - self.length, :] if tokens > self.length else None
        self.length = min(self.length, tokens)


def _tensor(name: str) -> property:
    """A layer's tensor by its name of transformers: what is written there leaves the room."""

    def read(layer: _InPlace) -> torch.Tensor | None:
        tensor = layer.tensors[name]
        return tensor.span() if isinstance(tensor, _Grown) else tensor

    def write(layer: _InPlace, value: torch.Tensor | None) -> None:
        layer.tensors[name] = value

    return property(read, write)


class _InPlace(DynamicLayer):
    """A layer whose ``tensors``, keys and values ``[1, heads, tokens, dim]``, grow in a room.

    Of several sequences, and after all that writes them otherwise, they are tensors of its own.
    """

    keys: Any = _tensor("keys")
    values: Any = _tensor("values")

    def __init__(self, rooms: Mapping[str, torch.Tensor]) -> None:
        self.tensors: dict[str, _Grown | torch.Tensor | None] = {}
        super().__init__()
        self.lazy_initialization(rooms["keys"], rooms["values"])

    def twin(self) -> _InPlace:
        """A layer like this one, with tensors of its own, of which it has none yet."""
        layer = type(self).__new__(type(self))
        layer.__dict__.update(self.__dict__, tensors={})
        return layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of a `DynamicLayer`, without the concatenation while there is room."""
        keys, values = self.tensors["keys"], self.tensors["values"]
        if isinstance(keys, _Grown) and isinstance(values, _Grown) and key_states.shape[0] == 1:
            return keys.append(key_states), values.append(value_states)
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self) -> int:
        """Tokens held."""
        keys = self.tensors["keys"]
        return keys.tokens if isinstance(keys, _Grown) else super().get_seq_length()

    def crop(self, tokens_to_remove: int) -> None:
        """As of a `DynamicLayer`: the room stays."""
        left = self.get_seq_length() - abs(tokens_to_remove)
        if any(not isinstance(t, _Grown) for t in self.tensors.values()):
            return super().crop(tokens_to_remove)
        for tensor in self.tensors.values():
            assert isinstance(tensor, _Grown)
            tensor.crop(left)


class _InPlaceIndexed(_InPlace, DynamicIndexedLayer):
    """An `_InPlace` layer with the keys of an indexer ``[1, tokens, dim]``."""

    indexer_keys: Any = _tensor("indexer_keys")

    def __init__(self, rooms: Mapping[str, torch.Tensor]) -> None:
        index = rooms["indexer_keys"]
        super().__init__(rooms)
        self.is_indexer_initialized, self.indexer_dtype, self.indexer_device = True, index.dtype, index.device

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """As of a `DynamicIndexedLayer`, without the concatenation while there is room."""
        index = self.tensors["indexer_keys"]
        if isinstance(index, _Grown) and indexer_key_states.shape[0] == 1:
            return index.append(indexer_key_states)
        return super().update_indexer(indexer_key_states)


def repeat(cache: ModelCache, times: int) -> ModelCache:
    """The cache with its batch repeated ``times`` (beam search, several return sequences)."""
    if times > 1 and cache_length(cache):
        detach(cache)
        cache.batch_repeat_interleave(times)
    return cache


def crop(cache: ModelCache, tokens: int) -> None:
    """Drop all behind the first ``tokens`` of a cache."""
    cache.crop(min(0, tokens - cache_length(cache)))


def share_rows(cache: ModelCache, rows: int) -> ModelCache:
    """The cache as ``rows`` equal sequences, in place; tensors are shared until the model appends."""
    if rows > 1:
        detach(cache)
    for layer in cache.layers:
        for name, tensor in _tensors(layer).items():
            setattr(layer, name, tensor.expand(rows, *tensor.shape[1:]))
    return cache


def join_as_rows(caches: Sequence[ModelCache], before: ModelCache | None = None) -> ModelCache:
    """One cache whose rows are ``caches``, for one forward of one token a row, which extends each of them.

    ``before`` is the one of the last forward: it serves again if its rows are these, and were extended by
    that forward alone.
    """
    if isinstance(before, _SideBySide) and before.goes_on(caches):
        return before
    return _SideBySide(caches)


def row_mask(cache: ModelCache, device: torch.device) -> torch.Tensor | None:
    """The mask ``[rows, tokens + 1]`` of the places that each row of a joined cache has; None if all."""
    if not isinstance(cache, _SideBySide) or not any(cache.gaps):
        return None
    mask = torch.ones(len(cache.gaps), cache.get_seq_length() + 1, dtype=torch.int64)
    for row, gap in zip(mask, cache.gaps, strict=True):
        row[:gap] = 0
    return mask.to(device)


_JOINED_BYTES = 256 << 20
"""Most bytes of rows that stay side by side from one forward to the next; larger ones are copied for one
layer at a time, which takes little of a forward that attends to so much."""

_JOINED_SPARE = 64
"""Tokens by which rows that stay side by side may grow before they are copied again."""


class _SideBySide(DynamicCache):
    """Several caches as rows, each filled up in front to the longest: so all go on at the same place.

    The mask hides what fills up.
    """

    def __init__(self, caches: Sequence[ModelCache]) -> None:
        super().__init__()
        self.layers = caches[0].layers  # for their kinds
        self._caches = tuple(caches)
        lengths = [cache_length(cache) for cache in caches]
        self._longest = max(lengths)
        self.gaps = [self._longest - length for length in lengths]
        tensors = cache_tensors(caches[0])
        a_token = sum([t.nbytes for t in tensors]) / max(1, lengths[0])
        self._stays = len(caches) * (self._longest + _JOINED_SPARE) * a_token <= _JOINED_BYTES
        self._joined: dict[tuple[int, str], torch.Tensor] = {}  # by layer and name, with spare tokens

    def goes_on(self, caches: Sequence[ModelCache]) -> bool:
        """Go on to the next forward, if these are its rows, each longer by the token of the last one."""
        if len(caches) != len(self._caches) or any(map(is_not, caches, self._caches)):
            return False
        longest = self._longest + 1
        if [cache_length(cache) for cache in caches] != [longest - gap for gap in self.gaps]:
            return False
        self._longest = longest
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row before the forward."""
        return self._longest

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Tokens that the forward attends to, and the place of the first."""
        return self._longest + query_length, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Extend each cache by its row ``[1, heads, 1, dim]``; all that the rows attend to."""
        rows = zip(self._caches, key_states.split(1), value_states.split(1), strict=True)
        pairs = [cache.update(keys, values, layer_idx, *args, **kwargs) for cache, keys, values in rows]
        keys, values = zip(*pairs, strict=True)
        return self._join(layer_idx, "keys", keys, key_states), self._join(
            layer_idx, "values", values, value_states
        )

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """As `update`, the keys of an indexer."""
        rows = zip(self._caches, indexer_key_states.split(1), strict=True)
        index = [cache.update_indexer(keys, layer_idx) for cache, keys in rows]
        return self._join(layer_idx, "indexer_keys", index, indexer_key_states)

    def _join(self, layer: int, name: str, rows: Sequence[torch.Tensor], new: torch.Tensor) -> torch.Tensor:
        """The ``rows`` side by side, of which ``new`` ``[rows, …, 1, dim]`` are the last tokens."""
        tokens = self._longest + 1
        whole = self._joined.get((layer, name))
        if whole is not None and tokens <= whole.shape[-2]:
            whole.narrow(-2, tokens - 1, 1).copy_(new)
            return whole.narrow(-2, 0, tokens)
        if not self._stays and not any(self.gaps):
            return torch.cat(list(rows))
        spare = _JOINED_SPARE if self._stays else 0
        *heads, _, dim = rows[0].shape
        whole = rows[0].new_empty(len(rows), *heads[1:], tokens + spare, dim)
        for into, row, gap in zip(whole, rows, self.gaps, strict=True):
            into[..., :gap, :] = 0  # finite, so that a weight of zero hides it
            into[..., gap:tokens, :] = row[0]
        if self._stays:
            self._joined[layer, name] = whole
        return whole.narrow(-2, 0, tokens)


def _tokens_of(layer: Any, name: str, start: int, stop: int | None, row: int) -> torch.Tensor:
    """``[heads, tokens, dim]`` of tokens ``start:stop`` of one sequence; the room is not read for others.

    An indexer's keys, which have no heads, have one here.
    """
    tensor: Any = layer.tensors[name] if isinstance(layer, _InPlace) else getattr(layer, name)
    tokens = tensor.span(start, stop) if isinstance(tensor, _Grown) else tensor[..., start:stop, :]
    return tokens[row : row + 1] if tokens.dim() == 3 else tokens[row]


def _tensors(layer: Any) -> dict[str, torch.Tensor]:
    if isinstance(layer, DummyLayer) or getattr(layer, "keys", None) is None:
        return {}
    tensors = {"keys": layer.keys, "values": layer.values}
    if getattr(layer, "indexer_keys", None) is not None:
        tensors["indexer_keys"] = layer.indexer_keys
    return tensors


def cache_tensors(cache: ModelCache) -> list[torch.Tensor]:
    """The tensors of all layers."""
    return [tensor for layer in cache.layers for tensor in _tensors(layer).values()]


def layer_devices(cache: ModelCache) -> Sequence[torch.device | None]:
    """Device of each layer's KV (None for a layer without); differs under ``device_map``."""
    return [next((t.device for t in _tensors(layer).values()), None) for layer in cache.layers]
