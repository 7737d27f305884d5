"""Answers of several threads, decoded together: one forward a step, in which each answer is a row.

Each answer is made by its own thread, with logits processors, stopping criteria and a cache of its own.
Between two tokens the threads meet here: the last one to come runs the model once for all that wait. An
answer joins with its first step and leaves by leaving its block, whatever its reason; the others do not
notice. One that takes long between two tokens (a streamer that blocks) is waited for as long as `_PATIENCE`
forwards take; after a second it keeps no other from a place, as what it waits for may be that other.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import StopStringCriteria
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    CandidateGenerator,
    PromptLookupCandidateGenerator,
)

from kamera import forks
from kamera.content import Encoded
from kamera.engines.base import Continuation
from kamera.engines.hf import cache as model_cache
from kamera.engines.hf import forwards
from kamera.engines.hf.cache import ModelCache
from kamera.engines.hf.contents import input_device
from kamera.engines.hf.forwards import join_spans
from kamera.engines.hf.prove import why_no_rows
from kamera.engines.hf.sampling import Method, read_options
from kamera.engines.work import check_cancelled, is_later
from kamera.errors import NonFiniteKV
from kamera.ops import KV, check_finite, kv_copy

if TYPE_CHECKING:
    from kamera.engines.hf.engine import HfEngine


ROWS = 16
"""Answers that are decoded at once, at most; others wait for a place before they run anything."""

LIVE_BYTES = 8 << 30
"""KV that they attend to, at most; one that alone has more is decoded alone."""

_PATIENCE = 2.0
_LEAST = 0.01  # seconds
_AWAY = 1.0  # seconds between two tokens, after which a row's place is another's, too


@dataclass(eq=False)
class AnswerRow:
    """One answer's place. Made by `Steps.row`, used by the thread that made it."""

    steps: Steps
    tokens: int
    thread: int = field(default_factory=threading.get_ident)
    asks: tuple[torch.Tensor, torch.Tensor, ModelCache] | None = None  # token, positions, past
    outcome: torch.Tensor | BaseException | None = None
    runs: int = 0  # forwards that this row's account bears
    comes: bool = False  # it is at its last token, and will ask for the next one
    logits_time: float | None = None  # when it got its last logits, and None while it waits for some

    def begin(self) -> None:
        """It has its first logits: the others wait for its first step."""
        self.comes, self.logits_time = not self.steps.runs_alone, time.monotonic()

    @property
    def is_away(self) -> bool:
        """True if its thread does something else than to ask for its next token."""
        return self.logits_time is not None and time.monotonic() - self.logits_time > _AWAY

    def step(self, token: torch.Tensor, positions: torch.Tensor, past: ModelCache) -> torch.Tensor:
        """Next-token logits ``[1, vocabulary]`` after ``token`` ``[1, 1]`` at ``positions`` ``[axes, 1]``.

        ``past`` is extended by the token. Raises what the forward raises, in every row of it.
        """
        check_cancelled()
        self.asks, self.logits_time = (token, positions, past), None
        try:
            return self.steps.step(self)
        finally:
            self.logits_time = time.monotonic()


class Steps:
    """The rows of one backbone, and their meeting. Safe for threads, which is what it is for."""

    def __init__(self, model: HfEngine, rows: int = ROWS, live_bytes: int = LIVE_BYTES) -> None:
        self._model = model
        self._most, self._most_tokens = rows, max(1, live_bytes // max(1, model.facts.bytes_per_token))
        self._reset()
        forks.call_in_child(self, Steps._reset)

    def _reset(self) -> None:
        self._change = threading.Condition()
        self._rows: list[AnswerRow] = []
        self._waiting_rows: deque[AnswerRow] = deque()
        self._asking_rows: list[AnswerRow] = []
        self._running_rows: list[AnswerRow] = []
        self._joined: ModelCache | None = None  # of the last forward of several rows
        self._end_time, self._seconds = 0.0, 0.0
        self._reason: str | None = None
        self._is_proving = False

    @property
    def why_serial(self) -> str:
        """Why answers that several threads decode at once share no forwards; "" if they do.

        Proved on a few tokens when it is asked first, or when two answers first meet.
        """
        if self._reason is None:
            self._reason = why_no_rows(self._model)
        return self._reason

    @property
    def runs_alone(self) -> bool:
        """True in a thread that runs its own forwards: in the background, under autocast, alone on it."""
        device = input_device(self._model.model)
        if is_later() or self._model.turns.holds_model or torch.is_autocast_enabled(device.type):
            return True
        return device.type == "cuda" and torch.cuda.current_stream(device) != torch.cuda.default_stream(
            device
        )

    @contextmanager
    def row(self, tokens: int) -> Iterator[AnswerRow]:
        """A place for an answer of ``tokens`` tokens, its prompt included: waits in order until there is one.

        Whoever runs its own forwards takes none, and does not wait; nor does a thread that has one already,
        as a streamer that asks a question of its own.
        """
        row = AnswerRow(self, tokens)
        if self.runs_alone:
            yield row
            return
        with self._change:
            self._waiting_rows.append(row)
            try:
                while not self._admits(row):
                    self._change.wait(_AWAY)
                    check_cancelled()
            finally:
                self._waiting_rows.remove(row)
            self._rows.append(row)
            self._change.notify_all()
        try:
            yield row
        finally:
            with self._change:
                self._change.wait_for(lambda: row not in self._running_rows)  # its thread was interrupted
                for rows in (self._rows, self._asking_rows):
                    if row in rows:  # not in a child that was forked inside
                        rows.remove(row)
                if len(self._rows) < 2:
                    self._joined = None
                self._change.notify_all()

    def step(self, row: AnswerRow) -> torch.Tensor:
        """As `AnswerRow.step`."""
        if len(self._rows) < 2 or self.runs_alone or self._is_serial():
            return self._forward([row])[0]
        with self._change:
            row.outcome, row.comes, arrival = None, False, time.monotonic()
            self._asking_rows.append(row)
            self._change.notify_all()
            while row.outcome is None and not self._is_step_due(arrival):
                self._change.wait(None if self._running_rows else self._seconds_left(arrival))
            rows = [] if row.outcome is not None else self._take()
        if rows:
            self._run(rows)
        self._model.meter.add(forwards=row.runs, tokens=1)
        outcome, row.outcome = row.outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None, "a row that was run has logits"
        return outcome

    # -- inside --------------------------------------------------------------------------------

    def _admits(self, row: AnswerRow) -> bool:
        if any([other.thread == row.thread for other in self._rows]):
            return True
        present_rows = [other for other in self._rows if not other.is_away]
        tokens = row.tokens + sum([other.tokens for other in present_rows])
        fits = len(present_rows) < self._most and tokens <= self._most_tokens
        return self._waiting_rows[0] is row and (fits or not present_rows)

    def _is_serial(self) -> bool:
        """True if rows may not share forwards, or while another thread finds out: nobody waits for that."""
        if self._reason is None:
            with self._change:
                if self._is_proving:
                    return True
                self._is_proving = True
            try:
                return bool(self.why_serial)
            finally:
                self._is_proving = False
        return bool(self.why_serial)

    def _seconds_left(self, arrival: float) -> float:
        """Seconds that one who came at ``arrival`` waits on for the others."""
        patience = max(_LEAST, _PATIENCE * self._seconds)
        return max(0.0, max(arrival, self._end_time) + patience - time.monotonic())

    def _is_step_due(self, arrival: float) -> bool:
        if self._running_rows:
            return False
        return not any(row.comes for row in self._rows) or not self._seconds_left(arrival)

    def _take(self) -> list[AnswerRow]:
        # in the order of `_rows`: equal rows in equal order stay side by side (`join_as_rows`)
        self._running_rows = [row for row in self._rows if row in self._asking_rows]
        self._asking_rows = []
        for row in self._rows:
            row.comes = False  # who is late comes when it comes
        return self._running_rows

    def _run(self, rows: Sequence[AnswerRow]) -> None:
        start = time.monotonic()
        outcomes: Sequence[torch.Tensor | BaseException]
        try:
            # no account is open there: each row's own thread counts its token
            outcomes = Context().run(self._forward, rows)
        except BaseException as error:
            outcomes, self._joined = [error] * len(rows), None
        with self._change:
            for i, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
                row.outcome, row.runs, row.comes = outcome, int(not i), row in self._rows
            self._running_rows, self._end_time = [], time.monotonic()
            self._seconds = self._end_time - start
            self._change.notify_all()

    def _forward(self, rows: Sequence[AnswerRow]) -> Sequence[torch.Tensor]:
        tokens, positions, pasts = zip(*(row.asks for row in rows if row.asks), strict=True)
        past = pasts[0]
        if len(rows) > 1:  # of one thread at a time
            self._joined = past = model_cache.join_as_rows(pasts, self._joined)
        return forwards.next_logits(
            self._model, torch.cat(tokens), torch.stack(positions, dim=1), past
        ).split(1)


def answer(
    model: HfEngine,
    row: AnswerRow,
    ids: torch.Tensor,
    positions: torch.Tensor,
    past: ModelCache,
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
    whole = join_spans(model, [*spans, Encoded(ids[stop:])], parts) if spans and is_one_row else None
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
    model: HfEngine,
    row: AnswerRow,
    positions: torch.Tensor,
    past: ModelCache,
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
