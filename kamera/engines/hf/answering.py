"""Answers: ``generate`` behind a cache, whose first forward runs the spans in front of the question, too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.configuration_utils import GenerationMode

from kamera.content import Encoded
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf.adjacent import joined, owned, split
from kamera.engines.values import Answer
from kamera.errors import NonFiniteKV
from kamera.ops import KV, check_finite, kv_map

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
    """As `Engine.decode`, behind ``past``, which is extended."""
    start, alone = model_cache.cache_length(past), _makes_one_row(backbone.model, sampling)
    lengths = [span.num_tokens for span in spans]
    stop = start + sum(lengths)
    parts = list(positions[:, start:].split([*lengths, ids.shape[0] - stop], dim=1))
    whole = joined(backbone, [*spans, Encoded(ids[stop:], {}, {})], parts) if spans and alone else None
    before: tuple[KV, ...] = ()
    if whole is None:
        before = _one_by_one(backbone, spans, parts, past)
    watch = _FirstLogits(backbone, past, start if before == () else stop, stop)
    options = {**sampling, "logits_processor": [*(sampling.get("logits_processor") or ()), watch]}
    tokens = backbone.generate(ids, positions, past, whole, **options)
    if not alone:
        return Answer(tokens, before, None, len(spans), watch.time)
    ran = model_cache.read(past, backbone.layout, start if whole else stop)
    behind = model_cache.cache_length(past) - stop
    *kvs, tail = split(ran, [*lengths, behind] if whole else [behind])
    return Answer(tokens, before or tuple(kvs), _sound(tail), 1 if whole else len(spans), watch.time)


class _FirstLogits:
    """A logits processor that changes nothing: at its first call it notes the time and checks spans' KV."""

    def __init__(self, backbone: Backbone, past: model_cache.ModelCache, start: int, stop: int) -> None:
        self.time = 0.0
        self._backbone, self._past, self._start, self._stop = backbone, past, start, stop

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` as they are. Raises NonFiniteKV."""
        if not self.time:
            if self._stop > self._start:
                check_finite(model_cache.read(self._past, self._backbone.layout, self._start, self._stop))
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
) -> tuple[KV, ...]:
    """KV of spans, each of which extends ``past``."""
    runs = zip(spans, positions, strict=False)
    return tuple(kv_map(backbone.run(span, places, past)[0], owned) for span, places in runs)
