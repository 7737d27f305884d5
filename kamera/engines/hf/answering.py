"""Answers: ``generate`` behind a cache, whose first forward runs the spans in front of the question, too.

Of one sequence ``generate`` of transformers reads the options and makes the logits processors and stopping
criteria; the loop over its tokens is `_decode_loop`, whose steps share forwards with other answers. Tokens
that an assistant or the prompt drafts are run in one forward; each is drawn as without them, and the first
that differs from its draft is the last of that forward. So drafts change no answer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from transformers import StopStringCriteria
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from kamera.content import Encoded
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import forwards
from kamera.engines.hf.forwards import join_spans
from kamera.engines.hf.model import Model
from kamera.engines.hf.sampling import Method, read_options
from kamera.engines.hf.steps import AnswerRow
from kamera.engines.values import Continuation
from kamera.errors import NonFiniteKV
from kamera.ops import KV, check_finite, kv_copy


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
    method = read_options(model.model, sampling)
    start, is_one_row = model_cache.cache_length(past), method.rows == 1
    lengths = [span.num_tokens for span in spans]
    stop = start + sum(lengths)
    parts = list(positions[:, start:].split([*lengths, ids.shape[0] - stop], dim=1))
    whole = join_spans(model, [*spans, Encoded(ids[stop:], {}, {})], parts) if spans and is_one_row else None
    kvs: list[KV] = []
    for span, places in zip(spans, parts, strict=False) if whole is None else ():
        kv, _ = forwards.run(model, span, places, past)
        kvs += [] if is_one_row else [kv_copy(kv)]
    watch, options = _FirstLogits(), method.options
    if not is_one_row:
        past = model_cache.repeat(past, method.rows)
        options = {**options, "logits_processor": [*(options.get("logits_processor") or ()), watch]}
        tokens = forwards.generate(model, ids, positions, past, **options)
        method.follow(ids, tokens)
        return Continuation(tokens, tuple(kvs), None, len(spans), watch.time)
    loop = partial(
        _decode_loop, model, row, positions, past, whole, stop, method, watch, options.get("streamer")
    )
    drafts_itself = method.assistant is model.model
    with (
        nullcontext() if model.quiet else model.turns.alone(),
        forwards.restore_state(model.model) if drafts_itself else nullcontext(),
    ):
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
    method: Method,
    watch: _FirstLogits,
    streamer: Any,
    of: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **_: Any,
) -> torch.Tensor:
    """Prompt and answer ``[1, tokens]``: the loop of one answer, as a decoding method of ``generate``.

    The first forward runs what ``past`` has not, alone: KV up to ``stop`` is that of spans, and is checked.
    In the end ``past`` holds all tokens but the last.
    """
    start = model_cache.cache_length(past)
    places = positions[:, start:]
    logits = watch(
        input_ids, forwards.next_logits(model, input_ids[:, start:], places[:, None], past, span=span)
    )
    if stop > start:
        check_finite(model_cache.read(past, model.layout, model.groups, start, stop))
    places, drafter, draft = places[:, -1:], None, list[int]()
    if not method.drafts:
        row.begin()
    while True:
        for i, next_logits in enumerate(logits.split(1)):
            scores = logits_processor(input_ids, next_logits.to(input_ids.device, torch.float32, copy=True))
            if generation_config.do_sample:
                token = torch.multinomial(scores.softmax(-1), 1)
            else:
                token = scores.argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, token], dim=-1)
            is_last = bool(stopping_criteria(input_ids, None).all())
            if streamer is not None:  # ``generate`` hands it to its own decoding methods alone
                streamer.put(token[0].cpu())
            if is_last or i == len(draft) or int(token) != draft[i]:
                break
        if draft:
            model_cache.crop(past, input_ids.shape[1] - 1)
        if is_last:
            break
        places = places + 1 + i
        if not method.drafts:
            logits = row.step(token, places, past)
            continue
        drafter = drafter or _drafter(method, generation_config, input_ids)
        drafter.update_candidate_strategy(input_ids, logits[None], i)
        draft = drafter.get_candidates(input_ids)[0][0, input_ids.shape[1] :].tolist()
        draft = draft[: max(0, model.limits.last - 1 - int(places.max()))]
        ids = torch.cat([token, token.new_tensor([draft])], dim=-1)
        logits = forwards.forward_batch(model, ids, places + torch.arange(1 + len(draft)), past)[0]
    if streamer is not None:
        streamer.end()
    return input_ids


def _drafter(method: Method, config: Any, input_ids: Any) -> CandidateGenerator:
    """What drafts an answer's tokens: the prompt if both are asked for, as in transformers."""
    if method.lookup is not None:
        return PromptLookupCandidateGenerator(
            eos_token_id=config._eos_token_tensor,
            num_output_tokens=method.lookup,
            max_matching_ngram_size=config.max_matching_ngram_size or 2,
            max_length=config.max_length,
        )
    config = copy.deepcopy(config)
    config.do_sample = False  # a draw of the assistant's would come between those of the answer
    mask = {"attention_mask": torch.ones_like(input_ids)}
    return AssistedCandidateGenerator(input_ids, method.assistant, config, mask, input_ids)


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


def _sound(kv: KV) -> KV | None:
    """The KV, if it is finite: the next turn must not take over what it would refuse."""
    try:
        check_finite(kv)
    except NonFiniteKV:
        return None
    return kv
