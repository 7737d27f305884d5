"""A Hugging Face model as an engine: chunk, encode, prefill, ask, decode, fingerprint, refuse."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kamera.content import Encoded
from kamera.engines.base import LiveKV, Sampling
from kamera.engines.extent import Extent, Extents, refuse_touching
from kamera.engines.hf import batch
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf.adjacent import joined, split
from kamera.engines.hf.answering import answer
from kamera.engines.hf.describe import Description, describe
from kamera.engines.hf.identity import ModelIdentity
from kamera.engines.hf.live import SLACK, LiveCache
from kamera.engines.hf.model import Model, ModelCache
from kamera.engines.hf.prove import prove_cuts, prove_relocation, without_reuse
from kamera.engines.hf.sample import can_sample, sample
from kamera.engines.hf.steps import Steps
from kamera.engines.values import Continuation
from kamera.errors import NonFiniteKV, UnsupportedBackbone, quote
from kamera.ops import KV, kv_bytes

logger = logging.getLogger(__name__)

_ROWS_BYTES = 256 << 20
"""Most bytes of KV that the rows of one forward stand behind (each may take a copy), and of their logits."""


class HfEngine(Model):
    """A loaded transformers model as an `Engine`: what stands behind a `Backbone`.

    Safe to use from several threads. Forwards of one model run one at a time, over all its engines and
    threads. Questions (`ask`, `decode`) run in parallel with each other and with the rest, if the constructor
    saw that a forward leaves no state in the model. Answers that are decoded at the same time share their
    forwards (see ``serial_decode``). Operations without a forward never wait.
    """

    def __init__(self, model: nn.Module, processor: Any | None = None) -> None:
        super().__init__(model, processor)
        self.identity = ModelIdentity(self)
        self._extents = Extents(self.positions)
        self._steps = Steps(self)
        kind = self.facts.kind
        try:
            no_reuse = without_reuse(prove_cuts(self), kind)
        except NonFiniteKV as error:
            raise UnsupportedBackbone(f"{kind}: a forward of a few tokens fails: {error}") from error
        self.facts = self.facts._replace(no_reuse=no_reuse)
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
    def fingerprint(self) -> str:
        """As `Engine.fingerprint`: each access checks the model (`Witness`), and autocast in this thread.

        Of a model that was loaded with ``by_files`` it is `checkpoint_fingerprint` of its files.
        """
        return self.identity.fingerprint()

    def describe(self) -> Description:
        """Family, layers, rotary facts, fingerprint, limits."""
        return describe(self, self._devices, self.serial_decode)

    def __repr__(self) -> str:
        return f"HfEngine({self.facts.kind}, {self.facts.family}, {len(self.layout)} layers)"

    # -- positions -----------------------------------------------------------------------------

    def extents(self, spans: Sequence[tuple[str, Encoded]]) -> list[Extent] | None:
        """As `Engine.extents`; each chunk is tested once."""
        if not self.facts.joins:
            refuse_touching(self.facts.kind, spans)
        given = [(chunk_id, e.input_ids, e.position_inputs) for chunk_id, e in spans]
        return self._extents.of_all(given, self.builder.vision_tokens)

    # -- running -------------------------------------------------------------------------------

    def live(self, *, holds: bool = False) -> LiveCache:
        """A live cache of this model that shows nothing yet; ``holds`` as in `Engine.live`."""
        return LiveCache(self, holds)

    def prefill(self, encoded: Encoded, positions: torch.Tensor, behind: LiveKV | None = None) -> KV:
        return self.prefill_run([encoded], [positions], behind)[0]

    def prefill_run(
        self, spans: Sequence[Encoded], positions: Sequence[torch.Tensor], behind: LiveKV | None
    ) -> tuple[KV, ...]:
        lengths = [span.num_tokens for span in spans]
        if not sum(lengths):
            return tuple(self.room(0) for _ in spans)
        whole = joined(self, spans, positions) if len(spans) > 1 else None
        runs = zip(spans, positions, strict=True)
        with self._cache_of(behind) as cache:
            start = model_cache.cache_length(cache)
            # one after another the cache grows behind each
            for span, places in runs if whole is None else [(whole, torch.cat(list(positions), dim=1))]:
                self.run(span, places, cache)
            return self._kept(behind, cache, start, lengths)

    def ask(self, ids: torch.Tensor, positions: torch.Tensor, behind: LiveKV) -> torch.Tensor:
        with self._cache_of(behind) as cache:
            return self.forward(ids, positions, cache)

    def follow(
        self, texts: Sequence[torch.Tensor], positions: torch.Tensor, behind: LiveKV
    ) -> tuple[torch.Tensor, ...]:
        """As `Engine.follow`: texts are filled up to the longest, as many at a time as `_ROWS_BYTES` hold."""
        said = 4 * self.token_count * max(map(len, texts), default=0)
        rows = max(1, _ROWS_BYTES // max(1, kv_bytes(behind.tensors), said))
        found: list[torch.Tensor] = []
        for start in range(0, len(texts), rows):
            some = texts[start : start + rows]
            longest = max(len(ids) for ids in some)
            # causal: what fills a row up stands behind the tokens that are asked
            whole = torch.stack([torch.cat([ids, ids[-1:].expand(longest - len(ids))]) for ids in some])
            with self._cache_of(behind) as past:
                logits = self.forward_batch(whole, positions[:, :longest], past)
            found += [row[: len(ids)] for row, ids in zip(logits, some, strict=True)]
        return tuple(found)

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
        if "stop_strings" in sampling:
            sampling.setdefault("tokenizer", getattr(self.processor, "tokenizer", self.processor))
        tokens = ids.shape[0] + int(sampling.get("max_new_tokens") or SLACK)
        with self._steps.row(tokens) as row, self._cache_of(behind) as cache:
            start, lengths = model_cache.cache_length(cache), [span.num_tokens for span in spans]
            said = answer(self, row, ids, positions, cache, spans, sampling)
            if not spans or said.kvs:
                return said
            return said._replace(kvs=self._kept(behind, cache, start, lengths))

    @property
    def serial_decode(self) -> str:
        """Why answers that several threads `decode` at once share no forwards; "" if they do.

        Proved on a few tokens when it is asked first, or when two answers first meet.
        """
        return self._steps.serial

    def can_sample(self, span: Encoded) -> bool:
        return can_sample(self, span)

    def sample(self, parts: Sequence[Sampling], behind: LiveKV) -> tuple[KV, ...]:
        with self._cache_of(behind) as cache:
            return sample(self, parts, [span.length for span in behind.shown], cache)

    def ask_whole(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        with self.turns.alone(), torch.no_grad():
            logits: torch.Tensor = self.model(**self._accepted(inputs)).logits[0, -1]
        return logits

    def answer_whole(self, inputs: Mapping[str, torch.Tensor], **sampling: Any) -> torch.Tensor:
        with self.turns.alone(), torch.no_grad():
            out = self.model.generate(**self._accepted(inputs), **sampling)
        tokens = out if isinstance(out, torch.Tensor) else out.sequences
        return tokens[:, inputs["input_ids"].shape[1] :].cpu()

    def batch_form(self, span: Encoded) -> Hashable | None:
        return batch.form(self, span)

    def prefill_batch(
        self, spans: Sequence[Encoded], positions: Sequence[torch.Tensor], past: KV
    ) -> tuple[KV, ...]:
        return batch.prefill(self, spans, positions, past)

    # -- inside --------------------------------------------------------------------------------

    def _accepted(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A processor's output without arguments that the model's forward lacks, on its device."""
        names = inputs.keys() & {*self.builder.accepted}
        return {name: inputs[name].to(self.device) for name in names}

    def _kept(
        self, behind: LiveKV | None, cache: ModelCache, start: int, lengths: Sequence[int]
    ) -> tuple[KV, ...]:
        """KV of consecutive spans of a cache from ``start`` on: where they stand, or copies.

        A copy does not keep the whole cache alive, and nothing else writes to it.
        """
        standing = behind.kept(cache, start, lengths) if isinstance(behind, LiveCache) else None
        if standing is not None:
            return standing
        return split(model_cache.read(cache, self.layout, self.groups, start), lengths)

    @contextmanager
    def _cache_of(self, behind: LiveKV | None) -> Iterator[ModelCache]:
        if behind is None:
            yield self.cache([])
            return
        if not isinstance(behind, LiveCache):
            raise ValueError(f"{quote(behind)} is no live cache of a Backbone: take one from its live()")
        with behind.lent() as cache:
            yield cache
