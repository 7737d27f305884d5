"""Answers: ``generate`` behind a cache, whose first forward runs the spans in front of the question, too.

Of one sequence ``generate`` of transformers reads the options and makes the logits processors and stopping
criteria; the loop over its tokens is `_decode_loop`, whose steps share forwards with other answers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers import StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode

from kamera.content import Encoded
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import forwards
from kamera.engines.hf.forwards import join_spans
from kamera.engines.hf.model import Model
from kamera.engines.hf.steps import AnswerRow
from kamera.engines.values import Continuation
from kamera.errors import NonFiniteKV
from kamera.ops import KV, check_finite, kv_copy

_ONE_ROW = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def answer(
    model: Model,
    row: AnswerRow,
    ids: torch.Tensor,
    positions: torch.Tensor,
    past: model_cache.ModelCache,
    spans: Sequence[Encoded],
    sampling: Mapping[str, Any],
) -> Continuation:
    """As `Engine.decode`, behind ``past``, which is extended; the ``row`` is its place among other answers.

    Of one sequence ``past`` then holds the KV of spans, too, and the answer has none.
    """
    start, is_one_row = model_cache.cache_length(past), _makes_one_row(model.model, sampling)
    lengths = [span.num_tokens for span in spans]
    stop = start + sum(lengths)
    parts = list(positions[:, start:].split([*lengths, ids.shape[0] - stop], dim=1))
    whole = join_spans(model, [*spans, Encoded(ids[stop:], {}, {})], parts) if spans and is_one_row else None
    kvs: list[KV] = []
    for span, places in zip(spans, parts, strict=False) if whole is None else ():
        kv, _ = forwards.run(model, span, places, past)
        kvs += [] if is_one_row else [kv_copy(kv)]
    watch = _FirstLogits()
    options = {**sampling, "logits_processor": [*(sampling.get("logits_processor") or ()), watch]}
    if not is_one_row:
        tokens = forwards.generate(model, ids, positions, past, **options)
        return Continuation(tokens, tuple(kvs), None, len(spans), watch.time)
    loop = partial(_decode_loop, model, row, positions, past, whole, stop, sampling.get("streamer"))
    with nullcontext() if model.quiet else model.turns.alone():
        tokens = forwards.generate(
            model, ids, positions, past, custom_generate=loop, **_without_tokenizer(model.model, options)
        )
    tail = kv_copy(model_cache.read(past, model.layout, model.groups, stop))
    return Continuation(tokens, (), _sound(tail), 1 if whole else len(spans), watch.time)


def _decode_loop(
    model: Model,
    row: AnswerRow,
    positions: torch.Tensor,
    past: model_cache.ModelCache,
    span: Encoded | None,
    stop: int,
    streamer: Any,
    of: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **_: Any,
) -> torch.Tensor:
    """Prompt and answer ``[1, tokens]``: the loop of one answer, as a decoding method of ``generate``.

    The first forward runs what ``past`` has not, alone: KV up to ``stop`` is that of spans, and is checked.
    """
    start = model_cache.cache_length(past)
    places = positions[:, start:]
    logits = forwards.next_logits(model, input_ids[:, start:], places[:, None], past, span=span)
    if stop > start:
        check_finite(model_cache.read(past, model.layout, model.groups, start, stop))
    places = places[:, -1:]
    row.begin()
    while True:
        scores = logits_processor(input_ids, logits.to(input_ids.device, torch.float32, copy=True))
        if generation_config.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1)
        else:
            token = scores.argmax(-1, keepdim=True)
        input_ids = torch.cat([input_ids, token], dim=-1)
        is_last = bool(stopping_criteria(input_ids, None).all())
        if streamer is not None:  # ``generate`` hands it to its own decoding methods alone
            streamer.put(token[0].cpu())
        if is_last:
            break
        places = places + 1
        logits = row.step(token, places, past)
    if streamer is not None:
        streamer.end()
    return input_ids


class _FirstLogits:
    """A logits processor that changes nothing: it notes the time of its first call."""

    time = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` as they are."""
        self.time = self.time or time.perf_counter()
        return scores


def _without_tokenizer(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options, but for stop strings: ``generate`` gives their tokenizer to no loop of others."""
    rest = {name: value for name, value in options.items() if name != "tokenizer"}
    config = options.get("generation_config") or model.generation_config
    strings = options.get("stop_strings") or config.stop_strings
    if not strings:
        return rest
    tokenizer: Any = options.get("tokenizer")
    stops = StopStringCriteria(tokenizer, strings)
    return {
        **rest,
        "stop_strings": None,
        "stopping_criteria": [*(rest.get("stopping_criteria") or ()), stops],
    }


def _makes_one_row(model: Any, sampling: Mapping[str, Any]) -> bool:
    """True if ``generate`` makes one sequence token by token, all of the prompt in its first forward."""
    if sampling.get("custom_generate"):
        return False
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
