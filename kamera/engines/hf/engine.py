"""A Hugging Face model as an engine: chunk, encode, prefill, ask, decode, fingerprint, refuse."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from kamera.content import Chunk, Encoded
from kamera.engines.base import Continuation, Identity, LiveKV, ModelFacts, PlainModel, Work
from kamera.engines.extent import Extents
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import contents, forwards, probe
from kamera.engines.hf.answering import Steps, answer
from kamera.engines.hf.cache import ModelCache
from kamera.engines.hf.contents import HfContents
from kamera.engines.hf.fingerprint import ModelIdentity
from kamera.engines.hf.forwards import TransformersModel, join_spans, split
from kamera.engines.hf.hooks import Meter, Pauses
from kamera.engines.hf.live import LiveCache
from kamera.engines.hf.prove import prove_cuts, prove_relocation, why_no_reuse
from kamera.engines.work import calls_of
from kamera.errors import NonFiniteKV, UnsupportedBackbone, quote
from kamera.ops import (
    KV,
    Blocks,
    CodedKV,
    Groups,
    Layout,
    check_encoding,
    kv_bytes,
    kv_tensors,
    layer_groups,
    regroup,
)

logger = logging.getLogger(__name__)

_ANSWER = 1024
"""Tokens expected of an answer that says no number."""

_ROWS_BYTES = 256 << 20
"""Most bytes of KV that the rows of one forward stand behind (each may take a copy), and of their logits."""


class HfEngine(HfContents):
    """A loaded transformers model as an `Engine`: what stands behind a `Backbone`.

    Safe to use from several threads. Forwards of one model run one at a time, over all its engines and
    threads. Questions (`ask`, `decode`) run in parallel with each other and with the rest, if the constructor
    saw that a forward leaves no state in the model. Answers that are decoded at the same time share their
    forwards (`Steps`). Operations without a forward never wait.

    Hooks are added that count forwards, one that stops forwards that only encode, and one in front of each
    layer, where forwards of background work stop while a call is in progress.
    """

    facts: ModelFacts

    def __init__(self, model: nn.Module, processor: Any | None = None, variant: str = "") -> None:
        super().__init__(model, processor)
        self._open_up()
        self.variant = variant
        self._identity = ModelIdentity(self, variant)
        self.extents = Extents(
            self.positions, self.builder.vision_tokens, "" if self.facts.joins else self.facts.kind
        )
        self.plain: PlainModel = TransformersModel(self)
        self.steps = Steps(self)
        kind = self.facts.kind
        try:
            no_reuse = why_no_reuse(prove_cuts(self), kind)
        except NonFiniteKV as error:
            raise UnsupportedBackbone(f"{kind}: a forward of a few tokens fails: {error}") from error
        self.facts = self.facts._replace(no_reuse=no_reuse)
        self._identity.fingerprint()  # tries the hooks that are there
        if no_reuse:
            logger.warning("%s", no_reuse)
            return
        proof = prove_relocation(self)
        if not proof.holds:
            raise UnsupportedBackbone(
                f"{kind}: moving keys does not equal a prefill at the new place "
                f"(relative error {proof.error:.1e} in {proof.worst}, tolerance {proof.tolerance:.0e}):"
                " its state is no relocatable KV; Kamera cannot serve it"
            )

    @property
    def engine(self) -> HfEngine:
        return self

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def fingerprint(self) -> str:
        """As `Engine.fingerprint`, under the autocast of this thread.

        Of a model that was loaded with ``by_files`` it is `checkpoint_fingerprint` of its files.
        """
        return self._identity.current()

    def checked_fingerprint(self) -> str:
        return self._identity.fingerprint()

    @property
    def vision_fingerprint(self) -> str:
        return self._identity.vision()

    @property
    def origin(self) -> str:
        return self._identity.origin()

    def check(self, fingerprint: str) -> None:
        self._identity.check(fingerprint)

    def refresh(self) -> None:
        """Make the fingerprint anew, of the model as it is now: for one that was written to.

        Windows that were made before refuse, unless it is what it was. Raises ModelChanged if the rotary
        angles are others than this engine read.
        """
        self._identity.refresh()

    def name(self, of_files: str) -> None:
        """As `ModelIdentity.name`."""
        self._identity.name(of_files)

    def __repr__(self) -> str:
        return f"HfEngine({self.facts.kind}, {self.facts.family}, {len(self.layout)} layers)"

    # -- running -------------------------------------------------------------------------------

    def live(self, *, holds: bool = False) -> LiveCache:
        """A live cache of this model that shows nothing yet; ``holds`` as in `Engine.live`."""
        return LiveCache(self, holds)

    def encode(self, chunk: Chunk) -> Encoded:
        self._identity.check_chunk(chunk)
        encoded = self._encode(chunk)
        self._identity.check_encoding(encoded, partial(self._encode, chunk))
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

    def form(self, span: Encoded) -> Hashable | None:
        return forwards.row_form(self, span)

    def prefill(
        self,
        spans: Sequence[Encoded],
        positions: Sequence[torch.Tensor],
        behind: LiveKV | None = None,
        *,
        apart: bool = False,
    ) -> tuple[KV, ...]:
        lengths = [span.num_tokens for span in spans]
        if not apart and not sum(lengths):
            return tuple(forwards.allocate_kv(self, 0) for _ in spans)
        self._identity.check_forward()
        whole = join_spans(self, spans, positions) if len(spans) > 1 and not apart else None
        with self._cache_of(behind) as cache:
            if apart:
                return forwards.run_rows(self, spans, positions, cache)
            start, runs = model_cache.cache_length(cache), zip(spans, positions, strict=True)
            # one after another the cache grows behind each
            for span, places in runs if whole is None else [(whole, torch.cat(list(positions), dim=1))]:
                forwards.run(self, span, places, cache)
            return self._read_kv(behind, cache, start, lengths)

    def ask(
        self,
        texts: Sequence[torch.Tensor],
        positions: torch.Tensor,
        behind: LiveKV,
        *,
        every: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """As `Engine.ask`: texts are filled up to the longest, as many at a time as `_ROWS_BYTES` hold."""
        self._identity.check_forward()
        rows = 1
        if len(texts) > 1:
            logits_bytes = 4 * self.builder.token_count * max(map(len, texts))
            rows = max(1, _ROWS_BYTES // max(1, kv_bytes(behind.tensors), logits_bytes))
        all_logits: list[torch.Tensor] = []
        for start in range(0, len(texts), rows):
            some = texts[start : start + rows]
            longest = max(len(ids) for ids in some)
            keep = longest if every or len(some) > 1 else 1
            # causal: what fills a row up stands behind the tokens that are asked
            whole = torch.stack([torch.cat([ids, ids[-1:].expand(longest - len(ids))]) for ids in some])
            with self._cache_of(behind) as past:
                logits = forwards.forward_batch(self, whole, positions[:, :longest], past, keep)
            batch_logits = [row[: len(ids) - longest + keep] for row, ids in zip(logits, some, strict=True)]
            all_logits += batch_logits if every else [row[-1:] for row in batch_logits]
        return tuple(all_logits)

    def decode(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        behind: LiveKV,
        spans: Sequence[Encoded] = (),
        **sampling: Any,
    ) -> Continuation:
        """As `Engine.decode`: ``sampling`` goes to ``generate`` of transformers."""
        self.check_sampling(sampling)
        self._identity.check_forward()
        if "stop_strings" in sampling:
            sampling.setdefault("tokenizer", getattr(self.processor, "tokenizer", self.processor))
        tokens = ids.shape[0] + int(sampling.get("max_new_tokens") or _ANSWER)
        with self.steps.row(tokens) as row, self._cache_of(behind) as cache:
            start, lengths = model_cache.cache_length(cache), [span.num_tokens for span in spans]
            continuation = answer(self, row, ids, positions, cache, spans, sampling)
            if not spans or continuation.kvs:
                return continuation
            return continuation._replace(kvs=self._read_kv(behind, cache, start, lengths))

    def attention(self, ids: torch.Tensor, positions: torch.Tensor, behind: LiveKV) -> list[torch.Tensor]:
        """As `forwards.attention`, behind the spans that ``behind`` shows; it shows the same afterwards."""
        self._identity.check_forward()
        with self._cache_of(behind) as cache:
            return forwards.attention(self, ids, positions, cache)

    def measure(self) -> AbstractContextManager[Work]:
        return self.meter.measure()

    # -- inside --------------------------------------------------------------------------------

    def _open_up(self) -> None:
        """Hook the model, run a few tokens, and read off its caches what they are."""
        model: nn.Module = self.model
        self.meter = Meter(self.decoder, self.towers)
        self.turns = Pauses(calls_of(self), model, self.decoder, self.towers)
        self.quiet = False  # not known yet
        self.routes = probe.has_experts(self.decoder)
        self.door = contents.DecoderHook(self.decoder)
        self.layout: Layout = ()
        self.groups: Groups = ()
        ids = (torch.arange(8) * 7919 + 11) % self.builder.token_count
        places = torch.arange(8).expand(self.axes, -1)
        with torch.no_grad(), self.turns.alone():
            self._fill_cache(ids, places)  # the first forward sets up state of its own
            before = probe.state_of(model)
            cache = self._fill_cache(ids, places)
            self.quiet = probe.is_same_state(before, probe.state_of(model))
            self.mask_input = contents.mask_input_name(self.model, self.door, ids, places)
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
            family="+".join(sorted({spec.family for spec in self.layout if spec.channels})),
            dtype=str(self.dtype).removeprefix("torch."),
            bytes_per_token=size * sum([n * width for n, width, _ in features]),
            phased_bytes_per_token=size * sum([n * width for n, width, rope in features if rope]),
            joins=self.mask_input is None,
        )

    def _fill_cache(self, ids: torch.Tensor, places: torch.Tensor) -> ModelCache:
        """A cache of a text, which the decoder filled."""
        cache = model_cache.new_cache(self.model.config)
        device = contents.input_device(self.model)
        rows, positions = ids[None].to(device), contents.with_batch(places).to(device)
        self.decoder(input_ids=rows, position_ids=positions, past_key_values=cache, use_cache=True)
        return cache

    def _encode(self, chunk: Chunk) -> Encoded:
        positions = self.positions([chunk.input_ids], [chunk.position_inputs()])
        with torch.no_grad(), self.turns.alone():
            encoded = contents.encode(self.model, self.door, chunk, positions)
        check_encoding(encoded.tensors, chunk.id)
        return encoded

    def _read_kv(
        self, live_kv: LiveKV | None, cache: ModelCache, start: int, lengths: Sequence[int]
    ) -> tuple[KV, ...]:
        """KV of consecutive spans of a cache from ``start`` on: where they stand, or copies.

        A copy does not keep the whole cache alive, and nothing else writes to it.
        """
        room_kvs = live_kv.adopt(cache, start, lengths) if isinstance(live_kv, LiveCache) else None
        if room_kvs is not None:
            return room_kvs
        return split(model_cache.read(cache, self.layout, self.groups, start), lengths)

    @contextmanager
    def _cache_of(self, live_kv: LiveKV | None) -> Iterator[ModelCache]:
        if live_kv is None:
            yield forwards.make_cache(self, [])
            return
        if not isinstance(live_kv, LiveCache):
            raise ValueError(f"{quote(live_kv)} is no live cache of a Backbone: take one from its live()")
        with live_kv.lend() as cache:
            yield cache
