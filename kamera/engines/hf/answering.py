"""Answers: ``generate`` behind a cache, whose first forward runs the spans in front of the question, too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.configuration_utils import GenerationMode

from kamera.content import Encoded
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf.adjacent import joined
from kamera.engines.values import Answer
from kamera.errors import NonFiniteKV
from kamera.ops import KV, check_finite, kv_copy

if TYPE_CHECKING:
    from kamera.engines.hf.backbone import Backbone

_ONE_ROW = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def answer(
    backbone: Backbone,
    ids: torch.Tensor,
    positions: torch.Tensor,
    past: model_cache.ModelCache,
    spans: Sequence[Encoded],
    sampling: Mapping[str, Any],
) -> Answer:
    """As `Engine.decode`, behind ``past``, which is extended.

    Of one sequence ``past`` then holds the KV of spans, too, and the answer has none.
    """
    start, alone = model_cache.cache_length(past), _makes_one_row(backbone.model, sampling)
    lengths = [span.num_tokens for span in spans]
    stop = start + sum(lengths)
    parts = list(positions[:, start:].split([*lengths, ids.shape[0] - stop], dim=1))
    whole = joined(backbone, [*spans, Encoded(ids[stop:], {}, {})], parts) if spans and alone else None
    kvs: tuple[KV, ...] = ()
    if whole is None:
        kvs = _one_by_one(backbone, spans, parts, past, keeps=not alone)
    watch = _FirstLogits(backbone, past, stop if whole is None else start, stop)
    options = {**sampling, "logits_processor": [*(sampling.get("logits_processor") or ()), watch]}
    tokens = backbone.generate(ids, positions, past, whole, **options)
    if not alone:
        return Answer(tokens, kvs, None, len(spans), watch.time)
    tail = kv_copy(model_cache.read(past, backbone.layout, backbone.groups, stop))
    return Answer(tokens, (), _sound(tail), 1 if whole else len(spans), watch.time)


class _FirstLogits:
    """A logits processor that changes nothing: at its first call it notes the time and checks spans' KV."""

    def __init__(self, backbone: Backbone, past: model_cache.ModelCache, start: int, stop: int) -> None:
        self.time = 0.0
        self._backbone, self._past, self._start, self._stop = backbone, past, start, stop

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` as they are. Raises NonFiniteKV."""
        if not self.time:
            if self._stop > self._start:
                backbone = self._backbone
                ran = model_cache.read(self._past, backbone.layout, backbone.groups, self._start, self._stop)
                check_finite(ran)
            self.time = time.perf_counter()
        return scores


def _makes_one_row(model: Any, sampling: Mapping[str, Any]) -> bool:
    """True if ``generate`` makes one sequence token by token, all of the prompt in its first forward."""
    config = sampling.get("generation_config") or model.generation_config
    settings = {name: value for name, value in sampling.items() if hasattr(config, name)}
    whole = {**config.to_dict(), **settings}
    if int(whole.get("num_return_sequences") or 1) > 1 or whole.get("prefill_chunk_size"):
        return False
    mode = type(config)(**whole).get_generation_mode(sampling.get("assistant_model"))
    return mode in _ONE_ROW


def _sound(kv: KV) -> KV | None:
    """The KV, if it is finite: the next turn must not take over what it would refuse."""
    try:
        check_finite(kv)
    except NonFiniteKV:
        return None
    return kv


def _one_by_one(
    backbone: Backbone,
    spans: Sequence[Encoded],
    positions: Sequence[torch.Tensor],
    past: model_cache.ModelCache,
    keeps: bool,
) -> tuple[KV, ...]:
    """Run spans, each of which extends ``past``; copies of their KV if it ``keeps`` them."""
    kvs: list[KV] = []
    for span, places in zip(spans, positions, strict=False):
        kv, _ = backbone.run(span, places, past)
        kvs += [kv_copy(kv)] if keeps else []
    return tuple(kvs)
