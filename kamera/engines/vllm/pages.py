"""Pages of a worker: KV of a store is written into them by the attention backend itself, and read back.

How a backend packs a block is its own affair: on a CPU a block has all its keys and then all its values, and
some kernels want keys transposed. So nothing here views a page. KV goes in through the write that the model's
own layers use, and the places of its numbers in a block are found by writing numbers that tell their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kamera.engines.vllm.layout import EngineLayout
from kamera.errors import UnsupportedBackbone
from kamera.ops import KV, Blocks

_DIGIT = 128
"""Numbers that tell a place are written digit by digit, each exact in any float of 8 bits or more."""


LayerInputs = tuple[torch.Tensor, torch.Tensor]
"""What a layer's write takes, ``[tokens, heads, dim]`` each: keys and values, or latents and keys."""


class EnginePages:
    """The pages of all layers in one worker.

    ``layers`` are vLLM's attention layers in decoder order, with their ``kv_cache`` bound, each
    ``[blocks, ...]``. With tensor parallelism the worker has the heads of its place in ``workers``, which all
    read the same pages at the same time; latents are in each of them.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        layout: EngineLayout,
        block: int,
        workers: torch.distributed.ProcessGroup,
    ) -> None:
        if len(layers) != len(layout.layers):
            raise UnsupportedBackbone(
                f"{len(layers)} attention layers in the engine, {len(layout.layers)} in its configuration"
            )
        self._layers, self._layout, self._block = tuple(layers), layout, block
        channel = layout.layers[0].channels[0]
        self._heads = 1 if layout.mla else int(layers[0].num_kv_heads)
        self._head = 0 if layout.mla else workers.rank() * channel.heads // workers.size()
        self._workers = workers
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None

    def slots(self, block_ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Slots of the tokens ``start`` up to ``stop`` of a request: int64 ``[tokens]``."""
        tokens = torch.arange(start, stop)
        blocks = torch.tensor(list(block_ids), dtype=torch.int64)
        return blocks[tokens // self._block] * self._block + tokens % self._block

    def write(self, kv: KV, slots: torch.Tensor) -> None:
        """Write KV of a span, as stores hold it, into ``slots`` ``[tokens]``: one write a layer."""
        for layer, channels in zip(self._layers, kv, strict=True):
            inputs = self._inputs(channels)
            self._update(layer, layer.kv_cache, inputs, slots.to(layer.kv_cache.device))

    def read(self, slots: torch.Tensor) -> KV:
        """KV of ``slots`` ``[tokens]`` as stores hold it, with all workers' heads: a copy, on the CPU."""
        blocks, row = (slots // self._block).unique(return_inverse=True)
        size = self._layers[0].kv_cache[0].numel()
        places = [row[:, None, None] * size + packing[slots % self._block] for packing in self._packing()]
        channels: dict[str, list[torch.Tensor]] = {}
        for layer in self._layers:
            flat = layer.kv_cache[blocks].cpu().flatten()
            for name, index in zip(self._names, places, strict=True):
                channels.setdefault(name, []).append(flat[index].transpose(0, 1))
        whole = {name: self._gather(torch.stack(parts)) for name, parts in channels.items()}
        if self._layout.paired:
            whole["k_pe"] = torch.cat((whole["k_pe"][..., 0::2], whole["k_pe"][..., 1::2]), dim=-1)
        return Blocks([whole], (tuple(range(len(self._layers))),))

    # -- inside --------------------------------------------------------------------------------

    @property
    def _names(self) -> tuple[str, str]:
        first, second = self._layout.layers[0].channels
        return first.name, second.name

    def _gather(self, mine: torch.Tensor) -> torch.Tensor:
        """All heads of a channel ``[layers, heads, tokens, dim]``; workers may have some twice."""
        heads, ranks = self._layout.layers[0].channels[0].heads, self._workers.size()
        if ranks == 1 or self._layout.mla:
            return mine
        own_bytes = mine.contiguous().view(torch.uint8)  # gloo knows bytes, whatever the dtype
        parts = [torch.empty_like(own_bytes) for _ in range(ranks)]
        torch.distributed.all_gather(parts, own_bytes, group=self._workers)
        return torch.cat(parts, dim=1)[:, :: self._heads * ranks // heads].view(mine.dtype)

    def _inputs(self, channels: Mapping[str, torch.Tensor]) -> LayerInputs:
        """A layer's channels ``[heads, tokens, dim]`` as its write takes them."""
        first, second = (channels[name].transpose(0, 1) for name in self._names)
        if not self._layout.mla:
            mine = slice(self._head, self._head + self._heads)
            return first[:, mine].contiguous(), second[:, mine].contiguous()
        if self._layout.paired:
            halves = second.unflatten(-1, (2, -1))
            second = halves.transpose(-1, -2).flatten(-2)
        return first[:, 0].contiguous(), second.contiguous()

    def _update(self, layer: Any, cache: torch.Tensor, inputs: LayerInputs, slots: torch.Tensor) -> None:
        """The write of the layer's own attention backend."""
        first, second = (x.to(cache) for x in inputs)
        if self._layout.mla:
            layer.impl.do_kv_cache_update(first, second, cache, slots, layer.kv_cache_dtype, layer._k_scale)
        else:
            layer.impl.do_kv_cache_update(layer, first, second, cache, slots)

    def _packing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The place of each number in a flat block: int64 ``[block tokens, heads, dim]`` for each."""
        if self._places is None:
            layer = self._layers[0]
            first, second = self._layout.layers[0].channels
            shapes = [(self._block, self._heads, c.dim) for c in (first, second)]
            sizes = [self._block * self._heads * c.dim for c in (first, second)]
            numbers = torch.arange(sum(sizes))
            block = torch.zeros_like(layer.kv_cache[:1])
            readings = torch.zeros(block.numel(), dtype=torch.int64)
            weight = 1
            while weight <= sum(sizes):
                digits = ((numbers + 1) // weight % _DIGIT).to(block.dtype)
                one, two = (d.view(shape) for d, shape in zip(digits.split(sizes), shapes, strict=True))
                block.zero_()
                one = one[:, 0] if self._layout.mla else one
                inputs = one.contiguous(), two.contiguous()
                self._update(layer, block, inputs, torch.arange(self._block))
                readings += block.flatten().cpu().long() * weight
                weight *= _DIGIT
            places = torch.full((sum(sizes) + 1,), -1)
            places[readings] = torch.arange(readings.numel())
            if bool((places[1:] < 0).any()):
                raise UnsupportedBackbone(f"{type(layer.impl).__name__} does not keep KV as it was given")
            one, two = (p.view(shape) for p, shape in zip(places[1:].split(sizes), shapes, strict=True))
            self._places = (one, two)
        return self._places
