"""A transformers model opened up: hooked and probed, to be run at the level of its own caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kamera.content import Chunk, Encoded
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import encode as encoding
from kamera.engines.hf import probe
from kamera.engines.hf.contents import HfContents
from kamera.engines.hf.hooks import Meter
from kamera.engines.hf.pausing import Pauses
from kamera.engines.precedence import calls_of
from kamera.engines.values import ModelFacts
from kamera.ops import (
    KV,
    Blocks,
    CodedKV,
    Groups,
    Layout,
    check_encoding,
    kv_tensors,
    layer_groups,
    regroup,
)

ModelCache = model_cache.ModelCache
"""The cache of transformers that a live cache is shown in."""


class Model(HfContents):
    """A loaded transformers model and the facts read off it; `kamera.engines.hf.forwards` runs it.

    Hooks are added that count forwards, one that stops forwards that only encode, and one in front of each
    layer, where forwards of later work stop while a call is in progress.
    """

    def __init__(self, loaded_model: nn.Module, processor: Any | None = None) -> None:
        super().__init__(loaded_model, processor)
        model: nn.Module = self.model
        self.meter = Meter(self.decoder, self.towers)
        self.turns = Pauses(calls_of(self), model, self.decoder, self.towers)
        self.quiet = False  # not known yet
        self.routes = probe.has_experts(self.decoder)
        self.door = encoding.DecoderHook(self.decoder)
        self.layout: Layout = ()
        self.groups: Groups = ()
        ids = (torch.arange(8) * 7919 + 11) % self.builder.token_count
        places = torch.arange(8).expand(self.axes, -1)
        with torch.no_grad(), self.turns.alone():
            self._fill_cache(ids, places)  # the first forward sets up state of its own
            before = probe.state_of(model)
            cache = self._fill_cache(ids, places)
            self.quiet = probe.is_same_state(before, probe.state_of(model))
            self.mask_input = encoding.mask_input_name(self.model, self.door, ids, places)
        self.layout = tuple(probe.probe_layout(self.decoder, self.config, cache))
        probe.refuse_tensor_subclasses(model, model_cache.cache_tensors(cache))
        devices = model_cache.layer_devices(cache)
        self.groups = layer_groups(self.layout, devices)
        self.devices = [devices[layers[0]] for layers in self.groups]
        self.dtype = next(kv_tensors(model_cache.read(cache, self.layout, self.groups))).dtype  # of the KV
        features = [(len(g), c.features, c.rope) for g in self.groups for c in self.layout[g[0]].channels]
        size = self.dtype.itemsize
        self.facts = ModelFacts(
            kind=type(model).__name__,
            checkpoint=getattr(self.model.config, "_name_or_path", "") or "",
            family="+".join(sorted({spec.family for spec in self.layout if spec.channels})),
            dtype=str(self.dtype).removeprefix("torch."),
            bytes_per_token=size * sum([n * width for n, width, _ in features]),
            phased_bytes_per_token=size * sum([n * width for n, width, rope in features if rope]),
            joins=self.mask_input is None,
        )

    def _fill_cache(self, ids: torch.Tensor, places: torch.Tensor) -> ModelCache:
        """A cache of a text, which the decoder filled."""
        cache = model_cache.new_cache(self.model.config)
        device = encoding.input_device(self.model)
        rows, positions = ids[None].to(device), encoding.with_batch(places).to(device)
        self.decoder(input_ids=rows, position_ids=positions, past_key_values=cache, use_cache=True)
        return cache

    def encode(self, chunk: Chunk) -> Encoded:
        """Run the vision tower over a chunk (not at all for text). Raises NonFiniteKV, IncompatibleChunk."""
        positions = self.positions([chunk.input_ids], [chunk.position_inputs()])
        with torch.no_grad(), self.turns.alone():
            encoded = encoding.encode(self.model, self.door, chunk, positions)
        check_encoding(encoded.tensors, chunk.id)
        return encoded

    def place(self, kv: KV) -> KV:
        """``kv`` with every layer on the model's device for it; ``kv`` itself if it is there already.

        Codes stay codes.
        """
        if isinstance(kv, CodedKV):
            return (kv if kv.groups == self.groups else kv.regroup(self.groups)).to(self.devices)
        kv = regroup(kv, self.groups)
        pairs = [(block, d) for block, d in zip(kv.parts, self.devices, strict=True) if d is not None]
        if all([t.device == d for block, d in pairs for t in block.values()]):
            return kv
        return Blocks(
            [
                {name: t if d is None else t.to(d) for name, t in block.items()}
                for block, d in zip(kv.parts, self.devices, strict=True)
            ],
            self.groups,
        )
