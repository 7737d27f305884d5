"""A Hugging Face model behind one interface: probe, chunk, prefill, decode, fingerprint, refuse."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kamera.content import Chunk, ChunkBuilder, Content, Encoded, Seams, exclusive_of
from kamera.engines.extent import Extents
from kamera.engines.hf import batch, probe
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import encode as encoding
from kamera.engines.hf import positions as positioning
from kamera.engines.hf.describe import Description, describe
from kamera.engines.hf.identity import Identity
from kamera.engines.hf.meter import Meter, Work
from kamera.engines.hf.probing import Answers, probe_answers, tolerance
from kamera.errors import IncompatibleChunk, NotRelocatable, UnsupportedBackbone
from kamera.ops import KV, CodedKV, LayerKV, Layout, check_encoding, check_finite, kv_concat

ModelCache = model_cache.ModelCache


class Backbone:
    """A loaded transformers model (and its processor) that Kamera can cut, move and patch.

    Construction probes the model: which layers hold what, how keys carry their position, and proves on
    a few tokens that moving them is exact. Raises UnsupportedBackbone, with the reason, for a model
    whose state is no relocatable KV. The model's weights and mode are not changed; hooks that count
    forwards, and one that stops those that are only to encode, are added.

    Safe to use from several threads. Forwards of one model run one after another, whichever backbones of it
    and threads ask for them; questions (`forward`, `generate`) run beside each other and beside the rest
    where a forward was seen to leave nothing behind in the model. What runs no forward waits for nobody.
    """

    def __init__(self, model: nn.Module, processor: Any | None = None) -> None:
        model = probe.without_wrapper(model)
        probe.refuse_unsupported(model)
        self.model: Any = model
        self.processor = processor
        self.decoder: Any = probe.find_decoder(model)
        self.config: Any = probe.text_config(model)
        self.axes = probe.position_axes(self.decoder)
        self.limit = probe.position_limit(model)
        towers = probe.find_vision_towers(model)
        self.builder = ChunkBuilder(model, processor, sees=bool(towers))
        self.meter = Meter(self.decoder, towers)
        self._exclusive = exclusive_of(model)
        self._door = encoding.Door(self.decoder)
        self.extents = Extents(self.positions)
        self._answers: tuple[Any, Answers] | None = None
        self.layout: Layout = ()
        self._mask_input: str | None = None
        probed, places = self._probe_tokens(), torch.arange(8).expand(self.axes, -1)
        with torch.no_grad(), self.alone():
            self._run(probed, places, None)  # what a first forward sets up has been set up
            before = probe.module_state(model)
            cache = self._run(probed, places, None)
            self.quiet = probe.module_state(model) == before
            self._mask_input = encoding.mask_input(self.model, self._door, probed.input_ids, places)
        self.layout = tuple(probe.probe_layout(self.decoder, self.config, cache))
        self.identity = Identity(model, self.decoder, processor, self.layout, self.limit)
        self._devices = model_cache.layer_devices(cache)
        self._like = next(t for layer in model_cache.read(cache, self.layout) for t in layer.values())[
            ..., :0
        ]
        self._prove()

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        device: str | None = None,
        dtype: str | torch.dtype = "auto",
        **options: Any,
    ) -> Backbone:
        """Load a model directory or hub name with its processor.

        ``device`` moves the whole model; ``device_map`` and every other option goes to
        ``from_pretrained`` of transformers. Raises UnsupportedBackbone when no class loads it.
        """
        from kamera.engines.hf.load import load_model, load_processor

        model = load_model(name, dtype=dtype, **options)
        if device is not None:
            model = model.to(device)
        return cls(model, load_processor(name))

    # -- identity ------------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """Digest of all that decides a chunk's KV.

        A look at the model each time finds out whether it has to be taken anew: a weight replaced or
        written, a setting of a module, config or processor changed, a hook added, autocast switched on in
        this thread. Raises ComputationChanged when the rotary facts are not those it was made with.
        """
        return self.identity.fingerprint()

    @property
    def vision_fingerprint(self) -> str:
        """The same of a chunk's encoding: without the decoder's layers, which it has not seen."""
        return self.identity.vision()

    def answers(self) -> Answers:
        """What the model answers to the probe: asked once, and anew whenever something about it moved."""
        state = (self.fingerprint, self.identity.moves)
        with self.alone():
            if self._answers is None or self._answers[0] != state:
                self._answers = (state, probe_answers(self))
            return self._answers[1]

    @property
    def tolerance(self) -> float:
        """How far two `answers` of one model may lie apart, as a share of their length."""
        return tolerance(self, self._like.dtype)

    @property
    def family(self) -> str:
        """Attention family of the layers that keep KV: "MHA", "GQA", "MQA", "MLA" or "MLA_EXPANDED"."""
        return "+".join(sorted({spec.family for spec in self.layout if spec.channels}))

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return next(self.model.parameters()).device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's KV, all layers."""
        return self._like.element_size() * sum(c.features for spec in self.layout for c in spec.channels)

    @property
    def masks_by_type(self) -> bool:
        """Whether the model makes its mask from token types: pictures that see their own later tokens."""
        return self._mask_input is not None

    def describe(self) -> Description:
        """Family, layers, rotary facts, fingerprint, limits."""
        return describe(self, self._like, self._devices)

    def __repr__(self) -> str:
        return f"Backbone({type(self.model).__name__}, {self.family}, {len(self.layout)} layers)"

    # -- content -------------------------------------------------------------------------------

    def chunk(self, content: Content) -> Chunk:
        """Build a chunk from a chat content list, an image, frames, a video or image path, or text.

        A list of pictures is a clip; on a processor without a video processor its frames become
        pictures one after another. Raises UnreadableMedia, EmptyChunk, ModalityNotSupported or
        ProcessorRequired.
        """
        return self.builder.from_content(content, self.fingerprint)

    def chunk_from_tensors(self, input_ids: Any, *, label: str = "", **vision_inputs: Any) -> Chunk:
        """Build a chunk from token ids and the model's own inputs (pixel_values, image_grid_thw, …)."""
        return self.builder.from_tensors(input_ids, vision_inputs, self.fingerprint, label)

    def seams(self, system: str | None) -> Seams:
        """The chat template's text before the first chunk, after a question, and after an answer."""
        if self.builder.format is None:
            return Seams(system or "", "", "")
        return self.builder.format.seams(system)

    def tokenize(self, text: str, *, special: bool = False) -> torch.Tensor:
        """Token ids of ``text``, int64 ``[tokens]``."""
        return self.builder.tokenize(text, special=special)

    def detokenize(self, ids: torch.Tensor) -> str | None:
        """Text of token ids without special tokens; None without a processor."""
        if self.builder.format is None:
            return None
        with self.builder.format.exclusive.alone():
            return str(self.builder.format.tokenizer.decode(ids, skip_special_tokens=True))

    # -- positions -----------------------------------------------------------------------------

    def positions(
        self, ids: Sequence[torch.Tensor], inputs: Sequence[Mapping[str, torch.Tensor]]
    ) -> torch.Tensor:
        """The model's own positions of spans standing one after another: int64 ``[axes, tokens]``."""
        joined = positioning.join_inputs([int(i.shape[0]) for i in ids], inputs)
        sequence = torch.cat([torch.empty(0, dtype=torch.int64), *ids])
        return positioning.model_positions(self.model, self.axes, sequence, joined)

    def check_positions(self, positions: torch.Tensor) -> None:
        """Raise NotRelocatable when positions reach where this model turns keys in another way."""
        if self.limit is None or positions.numel() == 0:
            return
        highest = int(positions.max())
        if highest >= self.limit.below:
            raise NotRelocatable(
                f"position {highest} reaches this model's limit of {self.limit.below}: "
                f"{self.limit.reason}; keep the window below it (max_tokens, slide)"
            )

    # -- prefill and decode --------------------------------------------------------------------

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
            # what get_rope_index does with more or fewer pictures than there are grids
            raise IncompatibleChunk(
                f"{type(self.model).__name__} has no positions for chunk {chunk.id[:12]}: its tokens and "
                f"the grids in {sorted(chunk.inputs)} do not belong together"
            ) from error
        with torch.no_grad(), self.alone():
            encoded = encoding.encode(self.model, self._door, chunk, positions)
        check_encoding(encoded.tensors, chunk.id)
        return encoded

    def prefill(
        self, encoded: Encoded, positions: torch.Tensor, past: ModelCache | None = None
    ) -> tuple[KV, ModelCache]:
        """Run a span through the decoder at explicit ``positions`` ``[axes, tokens]`` behind ``past``.

        Extends ``past`` in place. Returns views of the new tokens' KV, and the cache. Raises NonFiniteKV.
        """
        self.check_positions(positions)
        start = 0 if past is None else model_cache.cache_length(past)
        with torch.no_grad(), self.alone():
            cache = self._run(encoded, positions, past)
        kv = model_cache.read(cache, self.layout, start)
        check_finite(kv)
        return kv, cache

    def batch_form(self, span: Encoded) -> Hashable | None:
        """Equal for spans that may share a forward; None for one that may not."""
        return batch.form(self, span)

    def prefill_batch(
        self, spans: Sequence[Encoded], positions: Sequence[torch.Tensor], past: KV
    ) -> tuple[KV, ...]:
        """`prefill` of spans that share a `batch_form`, in one forward, each behind ``past`` alone."""
        return batch.prefill(self, spans, positions, past)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, past: ModelCache) -> torch.Tensor:
        """Next-token logits ``[vocabulary]`` after text ``ids`` behind ``past``, which is extended."""
        self.check_positions(positions)
        with torch.no_grad(), self._asking():
            out = self.model(
                input_ids=ids[None].to(self.device),
                position_ids=encoding.batched(positions).to(self.device),
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = out.logits[0, -1]
        return logits

    def forward_batch(self, ids: torch.Tensor, positions: torch.Tensor, past: ModelCache) -> torch.Tensor:
        """Next-token logits ``[rows, vocabulary]`` after each row of text ``ids`` ``[rows, tokens]``.

        Every row stands at the same ``positions`` behind the same ``past``, which must not be used again.
        """
        self.check_positions(positions)
        rows = ids.shape[0]
        places = encoding.batched(positions)
        places = places.expand(*places.shape[:-2], rows, -1)
        with torch.no_grad(), self._asking():
            out = self.model(
                input_ids=ids.to(self.device),
                position_ids=places.to(self.device),
                past_key_values=model_cache.spread(past, rows),
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = out.logits[:, -1]
        return logits

    def generate(
        self, ids: torch.Tensor, positions: torch.Tensor, past: ModelCache, **options: Any
    ) -> torch.Tensor:
        """``model.generate`` over the whole sequence ``ids`` of which ``past`` holds a prefix.

        ``positions`` are those of the whole sequence. Returns new tokens, ``[sequences, new]``.
        """
        self.check_positions(positions)
        rows = max(int(options.get("num_beams") or 1), int(options.get("num_return_sequences") or 1))
        sequence = ids[None].to(self.device)
        with torch.no_grad(), self._asking():
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
        held = [s for s in spans if s]
        kv = kv_concat(held) if len(held) > 1 else held[0] if held else self.no_kv()
        return model_cache.build(self.model.config, self.layout, kv)

    def share(self, cache: ModelCache) -> ModelCache:
        """A cache over the same tensors; what is appended to it leaves ``cache`` as it is."""
        return model_cache.share(cache, self.model.config, self.layout)

    def room(self, tokens: int) -> tuple[LayerKV, ...]:
        """Uninitialised KV of ``tokens`` tokens, every layer on the device the model keeps it on."""
        return tuple(
            {c.name: self._like.new_empty(c.heads, tokens, c.dim, device=d) for c in spec.channels}
            for spec, d in zip(self.layout, self._devices, strict=True)
        )

    @contextmanager
    def growing(self, room: KV, start: int, stop: int) -> Iterator[ModelCache]:
        """A cache of the tokens ``start:stop`` of ``room`` that grows in place behind them, in the block."""
        cache = model_cache.growing(self.model.config, self.layout, room, start, stop)
        try:
            yield cache
        finally:
            model_cache.detach(cache)

    def no_kv(self) -> tuple[LayerKV, ...]:
        """The KV of zero tokens."""
        return self.room(0)

    def place(self, kv: KV) -> KV:
        """``kv`` with every layer on the device the model keeps it on: itself when it is there already.

        Codes stay codes.
        """
        if isinstance(kv, CodedKV):
            return kv.to(self._devices)
        if all(
            d is None or t.device == d for x, d in zip(kv, self._devices, strict=True) for t in x.values()
        ):
            return kv
        return tuple(
            {name: t if d is None else t.to(d) for name, t in layer.items()}
            for layer, d in zip(kv, self._devices, strict=True)
        )

    @contextmanager
    def measure(self) -> Iterator[Work]:
        """Count decoder forwards, their tokens and vision encodes inside the block."""
        with self.meter.measure() as work:
            yield work

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread runs a forward of this model, and keep them waiting for the block.

        Whoever runs the model past the methods of this class holds it. Re-entrant.
        """
        with self._exclusive.alone():
            yield

    # -- inside --------------------------------------------------------------------------------

    def _asking(self) -> AbstractContextManager[None]:
        return nullcontext() if self.quiet else self.alone()

    def _run(self, encoded: Encoded, positions: torch.Tensor, past: ModelCache | None) -> ModelCache:
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
            # blocks never cross a chunk, so what stands before counts as text.
            before = kinds.new_zeros(model_cache.cache_length(cache))
            arguments[str(self._mask_input)] = torch.cat([before, kinds])[None].to(self.device)
            self.model.model(**arguments)
        else:
            self.decoder(**arguments)
        return cache

    def _probe_tokens(self, count: int = 8) -> Encoded:
        size = self.model.get_input_embeddings().weight.shape[0]
        ids = (torch.arange(count) * 7919 + 11) % size
        return Encoded(ids, {}, {})

    def _prove(self) -> None:
        from kamera.engines.hf.prove import prove_relocation

        proof = prove_relocation(self)
        if not proof.holds:
            raise UnsupportedBackbone(
                f"{type(self.model).__name__}: moving keys does not equal a prefill at the new place "
                f"(relative error {proof.error:.1e} in {proof.worst}, tolerance {proof.tolerance:.0e}):"
                " its state is no relocatable KV; Kamera cannot serve it"
            )
