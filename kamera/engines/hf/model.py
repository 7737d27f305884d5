"""A transformers model opened up: probed, and run at the level of its own caches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from kamera.content import Chunk, Encoded
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import encode as encoding
from kamera.engines.hf import probe
from kamera.engines.hf.contents import HfContents
from kamera.engines.hf.meter import Meter
from kamera.engines.hf.pausing import Pauses
from kamera.engines.precedence import calls_of
from kamera.engines.values import ModelFacts, Work
from kamera.errors import IncompatibleChunk
from kamera.ops import (
    KV,
    Blocks,
    CodedKV,
    Groups,
    Layout,
    check_encoding,
    check_finite,
    kv_concat,
    kv_tensors,
    layer_groups,
    regroup,
)

ModelCache = model_cache.ModelCache
"""The cache of transformers that a live cache is shown in."""


class Model(HfContents):
    """A loaded transformers model, the facts read off it, and its forwards behind caches of its own.

    Hooks are added that count forwards, one that stops forwards that only encode, and one in front of each
    layer, where forwards of later work stop while a call is in progress.
    """

    def __init__(self, given: nn.Module, processor: Any | None = None) -> None:
        super().__init__(given, processor)
        model: nn.Module = self.model
        self.meter = Meter(self.decoder, self.towers)
        self.turns = Pauses(calls_of(self), model, self.decoder)
        self.quiet = False  # not known yet
        self.door = encoding.Door(self.decoder)
        self.layout: Layout = ()
        self.groups: Groups = ()
        self._mask_input: str | None = None
        probed = Encoded((torch.arange(8) * 7919 + 11) % self.token_count, {}, {})
        places = torch.arange(8).expand(self.axes, -1)
        with torch.no_grad(), self.turns.alone():
            self._decoded(probed, places, None)  # the first forward sets up state of its own
            watch = probe.watch_modules(model)
            before = probe.counts_of_writes(watch)
            cache = self._decoded(probed, places, None)
            self.quiet = watch.is_as_noted() and probe.counts_of_writes(watch) == before
            self._mask_input = encoding.mask_input_name(self.model, self.door, probed.input_ids, places)
        self.layout = tuple(probe.probe_layout(self.decoder, self.config, cache))
        probe.refuse_wrapped(model, model_cache.cache_tensors(cache))
        devices = model_cache.layer_devices(cache)
        self.groups = layer_groups(self.layout, devices)
        self._devices = [devices[layers[0]] for layers in self.groups]
        self._like = next(kv_tensors(model_cache.read(cache, self.layout, self.groups)))[..., :0]
        self.dtype = self._like.dtype  # of the KV
        features = [(len(g), c.features, c.rope) for g in self.groups for c in self.layout[g[0]].channels]
        size = self._like.element_size()
        self.facts = ModelFacts(
            kind=type(model).__name__,
            checkpoint=getattr(self.model.config, "_name_or_path", "") or "",
            family="+".join(sorted({spec.family for spec in self.layout if spec.channels})),
            dtype=str(self.dtype).removeprefix("torch."),
            bytes_per_token=size * sum([n * width for n, width, _ in features]),
            phased_bytes_per_token=size * sum([n * width for n, width, rope in features if rope]),
            joins=self._mask_input is None,
        )

    # -- facts ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of token ids."""
        return next(self.model.parameters()).device

    @property
    def token_count(self) -> int:
        """Number of token ids: valid ones are below it."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def encode(self, chunk: Chunk) -> Encoded:
        """Run the vision tower over a chunk (not at all for text). Raises NonFiniteKV, IncompatibleChunk."""
        if chunk.fingerprint != self.fingerprint:
            raise IncompatibleChunk(
                f"chunk {chunk.id[:12]} was built by backbone {chunk.fingerprint[:12]}, this is "
                f"{self.fingerprint[:12]}: build it again with this backbone's chunk()"
            )
        try:
            positions = self.positions([chunk.input_ids], [chunk.position_inputs()])
        except (StopIteration, IndexError, RuntimeError, TypeError) as error:
            # raised by get_rope_index for more or fewer pictures than grids
            raise IncompatibleChunk(
                f"{self.facts.kind} has no positions for chunk {chunk.id[:12]}: its tokens and "
                f"the grids in {sorted(chunk.inputs)} do not belong together"
            ) from error
        with torch.no_grad(), self.turns.alone():
            encoded = encoding.encode(self.model, self.door, chunk, positions)
        check_encoding(encoded.tensors, chunk.id)
        return encoded

    # -- forwards ------------------------------------------------------------------------------

    def run(
        self, encoded: Encoded, positions: torch.Tensor, past: ModelCache | None = None
    ) -> tuple[KV, ModelCache]:
        """Run a span through the decoder at explicit ``positions`` ``[axes, tokens]`` behind ``past``.

        Extends ``past`` in place. Returns views of the new tokens' KV, and the cache. Raises NonFiniteKV.
        """
        self.limits.check_tokens(positions)
        start = 0 if past is None else model_cache.cache_length(past)
        with torch.no_grad(), self.turns.turn(alone=True, pauses=self.quiet):
            cache = self._decoded(encoded, positions, past)
        kv = model_cache.read(cache, self.layout, self.groups, start)
        check_finite(kv)
        return kv, cache

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, past: ModelCache) -> torch.Tensor:
        """Next-token logits ``[vocabulary]`` after text ``ids`` behind ``past``, which is extended."""
        return self.next_logits(ids[None], positions[:, None], past)[0]

    def forward_batch(self, ids: torch.Tensor, positions: torch.Tensor, past: ModelCache) -> torch.Tensor:
        """Logits ``[rows, tokens, vocabulary]`` after each token of texts ``ids`` ``[rows, tokens]``.

        Every row is at the same ``positions`` behind the same ``past``, which must not be used again.
        """
        rows = ids.shape[0]
        places = positions[:, None].expand(-1, rows, -1)
        return self._logits(ids, places, model_cache.spread(past, rows), ids.shape[1])

    def next_logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        *pasts: ModelCache,
        coming: Encoded | None = None,
    ) -> torch.Tensor:
        """Next-token logits ``[rows, vocabulary]`` after ``ids`` ``[rows, tokens]``, a row behind each past.

        ``positions`` are ``[axes, rows, tokens]``; the pasts are extended. One row may have many tokens, and
        ``coming``, its content if that is not all text; several have one token each.
        """
        past, seen = (pasts[0], None) if len(pasts) == 1 else model_cache.side_by_side(pasts, self.device)
        content = {} if coming is None else encoding.decoder_arguments(coming, self.device)
        with self.door.bearing(content) if content else nullcontext():
            return self._logits(ids, positions, past, 1, seen)[:, -1]

    def generate(
        self, ids: torch.Tensor, positions: torch.Tensor, past: ModelCache, **options: Any
    ) -> torch.Tensor:
        """``model.generate`` over the whole sequence ``ids`` of which ``past`` holds a prefix.

        ``positions`` are those of the whole sequence. Returns new tokens, ``[sequences, new]``.
        """
        self.limits.check_tokens(positions)
        rows = max(int(options.get("num_beams") or 1), int(options.get("num_return_sequences") or 1))
        sequence = ids[None].to(self.device)
        with torch.no_grad(), self.turns.turn(alone=not self.quiet, pauses=self.quiet):
            out = self.model.generate(
                input_ids=sequence,
                attention_mask=torch.ones_like(sequence),
                position_ids=encoding.batched(positions).to(self.device),
                past_key_values=model_cache.repeat(past, rows),
                **options,
            )
        tokens = out if isinstance(out, torch.Tensor) else out.sequences
        return tokens[:, ids.shape[0] :].cpu()

    # -- caches --------------------------------------------------------------------------------

    def cache(self, spans: Sequence[KV]) -> ModelCache:
        """A live cache that holds ``spans`` one after another (copied when more than one)."""
        held = [s for s in spans if s.groups]
        kv = kv_concat(held) if len(held) > 1 else held[0] if held else self.room(0)
        return model_cache.build(self.model.config, self.layout, kv)

    def room(self, tokens: int) -> KV:
        """Uninitialised KV of ``tokens`` tokens, every layer on the model's device for it."""
        return Blocks(
            [
                {
                    c.name: self._like.new_empty(len(layers), c.heads, tokens, c.dim, device=device)
                    for c in self.layout[layers[0]].channels
                }
                for layers, device in zip(self.groups, self._devices, strict=True)
            ],
            self.groups,
        )

    def place(self, kv: KV) -> KV:
        """``kv`` with every layer on the model's device for it; ``kv`` itself if it is there already.

        Codes stay codes.
        """
        if isinstance(kv, CodedKV):
            return (kv if kv.groups == self.groups else kv.regroup(self.groups)).to(self._devices)
        kv = regroup(kv, self.groups)
        pairs = [(block, d) for block, d in zip(kv.parts, self._devices, strict=True) if d is not None]
        if all([t.device == d for block, d in pairs for t in block.values()]):
            return kv
        return Blocks(
            [
                {name: t if d is None else t.to(d) for name, t in block.items()}
                for block, d in zip(kv.parts, self._devices, strict=True)
            ],
            self.groups,
        )

    def measure(self, *, probes: bool = False) -> AbstractContextManager[Work]:
        """Count decoder forwards, their tokens and vision encodes inside the block."""
        return self.meter.measure(probes)

    # -- inside --------------------------------------------------------------------------------

    def _logits(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        past: ModelCache,
        keep: int,
        seen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """After the last ``keep`` of ``ids`` ``[rows, tokens]`` at ``positions`` ``[axes, rows, tokens]``."""
        self.limits.check_tokens(positions)
        with torch.no_grad(), self.turns.turn(alone=not self.quiet, pauses=self.quiet):
            out = self.model(
                input_ids=ids.to(self.device),
                attention_mask=seen,
                position_ids=(positions if len(positions) > 1 else positions[0]).to(self.device),
                past_key_values=past,
                use_cache=True,
                logits_to_keep=keep,
            )
        logits: torch.Tensor = out.logits
        return logits

    def _decoded(self, encoded: Encoded, positions: torch.Tensor, past: ModelCache | None) -> ModelCache:
        cache = model_cache.new_cache(self.model.config) if past is None else past
        arguments = encoding.decoder_arguments(encoded, self.device)
        arguments |= {
            "position_ids": encoding.batched(positions).to(self.device),
            "past_key_values": cache,
            "use_cache": True,
        }
        kinds = encoded.position_inputs.get(self._mask_input or "")
        if kinds is not None and encoded.tensors:
            # The outer model derives the mask from token types over the cached tokens too; image
            # blocks never cross a chunk, so the tokens before count as text.
            before = kinds.new_zeros(model_cache.cache_length(cache))
            arguments[str(self._mask_input)] = torch.cat([before, kinds])[None].to(self.device)
            self.model.model(**arguments)
        else:
            self.decoder(**arguments)
        return cache
