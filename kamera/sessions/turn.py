"""Answer and cost of a turn of a conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kamera.engines import Engine, Spent
from kamera.reuse import Admission
from kamera.sessions.logprobs import Logprob
from kamera.sessions.modes import Applied
from kamera.sessions.sampling import with_seed
from kamera.sessions.stream import FinishReason, Stream
from kamera.sessions.tool_calls import CallForm, Calls
from kamera.trust import Guarantee, weakest
from kamera.window import KameraWindow, Report, Slot, former_of


@dataclass(frozen=True)
class TurnReport:
    """Cost of bringing the cache to a turn's prompt.

    Tokens of the prompt, each counted once: ``kept`` in place, ``turned`` (relocated), ``patched`` (a stored
    patch for new antecedents, no forward), ``sampled`` (completed from others of their chunk, which ran),
    ``prefilled``. ``left`` are tokens that the prompt no longer has.
    ``forwards``, ``tokens_recomputed`` (canonicals formed in between included) and ``vision_encodes`` are
    measured, with those of a system prompt that was new, and exclude the answer's own. After
    ``session.edit`` the last tokens of ``prefilled``, which ask for an answer, have not run yet.
    ``guarantee`` is the weakest in the window, ``mode`` the mode that was applied (the one chosen, of
    "auto"). ``uncached`` is the reason if the plain model answered (``session.send`` with
    ``uncached=True``); None if the window did.
    ``first_token``: seconds from the request to the logits of the answer's first token, edit policy and
    template included; None without an answer (``session.edit``). ``anticipated`` are those of the kept
    tokens that stand in place because they were prepared after the answer before (`ChatSession.anticipate`):
    0 if what was prepared is not this prompt's, None if nothing was. ``admissions``: tier and reason of each
    segment, with ``reuse``.
    """

    prefilled: int
    forwards: int
    tokens_recomputed: int
    vision_encodes: int
    seconds: float
    guarantee: Guarantee
    mode: Applied
    kept: int = 0
    turned: int = 0
    patched: int = 0
    sampled: int = 0
    left: int = 0
    notes: tuple[str, ...] = ()
    uncached: str | None = None
    first_token: float | None = None
    anticipated: int | None = None
    admissions: tuple[Admission, ...] = ()

    def and_then(self, scratch: TurnReport, unasked: int) -> TurnReport:
        """This report with the work of a branch behind it, whose tokens leave with the answer.

        The last ``unasked`` tokens of this report's prompt ask for an answer, which is the branch's: they did
        not run.
        """
        return replace(
            self,
            prefilled=self.prefilled - unasked + scratch.prefilled,
            forwards=self.forwards + scratch.forwards,
            tokens_recomputed=self.tokens_recomputed + scratch.tokens_recomputed,
            vision_encodes=self.vision_encodes + scratch.vision_encodes,
            seconds=self.seconds + scratch.seconds,
            guarantee=weakest((self.guarantee, scratch.guarantee)),
            notes=(*self.notes, *scratch.notes),
        )


class Stopwatch:
    """A logits processor that changes nothing, and notes when it was called first, and how often.

    ``seconds`` from its construction until then; None before. ``steps``: one for each token of an answer. Its
    ``stream`` begins behind the prompt. Of one sequence it notes how likely each token was, with the ``most``
    likeliest ones at its place; None: it does not.
    """

    def __init__(self, stream: Stream, engine: Engine, most: int | None = None) -> None:
        self.stream, self._engine, self._most = stream, engine, most
        self._started = time.perf_counter()
        self.seconds: float | None = None
        self.steps = 0
        self._noted: list[Logprob] = []
        self._next: torch.Tensor | None = None  # log probabilities of the token that comes

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` as they are."""
        self.steps += 1
        if self.seconds is None:
            self.seconds = time.perf_counter() - self._started
            self.stream.begin(self._engine, input_ids.shape[1])
        if self._most is not None:
            self._note(input_ids[0, -1:].tolist())
            self._next = scores[0].float().log_softmax(-1)
        return scores

    def following(self, options: dict[str, Any], seed: int | None) -> dict[str, Any]:
        """Options of an answer drawn with ``seed``, that is followed in front of all that changes its scores.

        Raises ValueError for options that an answer does not take.
        """
        self._engine.check_sampling(options)
        if int(options.get("num_return_sequences") or 1) > 1:
            raise ValueError(f"num_return_sequences={options['num_return_sequences']}: a turn has one answer")
        if "stop_strings" in options:
            processor = self._engine.processor
            options = {"tokenizer": getattr(processor, "tokenizer", processor), **options}
        options = with_seed(options, seed)
        watched = {
            "logits_processor": [self, *(options.get("logits_processor") or ())],
            "stopping_criteria": [*(options.get("stopping_criteria") or ()), self.stream],
        }
        return {**options, **watched}

    @property
    def logprobs(self) -> tuple[Logprob, ...] | None:
        """Those of the answer, which has ended, one for each token; None if they were not asked for."""
        self._note(self.stream.ids[-1:])
        return None if self._most is None else tuple(self._noted)

    def _note(self, last: Sequence[int]) -> None:
        if self._next is not None and last:
            values, places = self._next.topk(self._most or 0)
            likeliest = tuple(zip(places.tolist(), values.tolist(), strict=True))
            self._noted.append(Logprob(last[0], float(self._next[last[0]]), likeliest))
            self._next = None


class TurnUsage(NamedTuple):
    """Tokens of a turn: its prompt, the part of it whose KV was at hand, and the answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Turn:
    """An answer: its text, the tool calls in it, the report of its prompt, and its tokens.

    ``content`` is the text outside of the calls, which are in OpenAI's form: arguments are JSON in a text.
    ``token_ids`` are the answer's, closing ones included; none of beam search. ``turn_id`` names the history
    up to this answer, and no other ever. ``logprobs`` has an entry for each token, None if they were not
    asked for. ``session_id`` names the session of a `SessionPool` that answered.
    """

    text: str
    content: str
    tool_calls: Calls
    report: TurnReport
    usage: TurnUsage
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    turn_id: str
    logprobs: tuple[Logprob, ...] | None = None
    session_id: str | None = None


class Spoken(NamedTuple):
    """An answer: its text, what of it is no tool call, and the calls; ``message`` is it in the history."""

    text: str
    content: str
    calls: Calls
    message: dict[str, Any]


def spoken(text: str, stream: Stream, form: CallForm, tools: Sequence[Any] | None) -> Spoken:
    """The answer ``text``, up to a stop string. In the history it is as it was said.

    Special tokens cannot be: calls that are written with them are given to the template.
    """
    text = stream.finish(text)
    content, calls = form.parsed(stream.spoken(text, form), tools)
    text, message = form.plain(text), {"role": "assistant"}
    if form.special and calls:
        return Spoken(text, content, calls, {**message, "content": content, "tool_calls": list(calls)})
    return Spoken(text, content, calls, {**message, "content": text})


def turn_report(
    before: Sequence[Slot],
    report: Report,
    window: KameraWindow,
    opening: Spent,
    prompt: int,
    left: int,
    mode: Applied,
    admissions: tuple[Admission, ...] = (),
) -> TurnReport:
    """The report of an operation from the slots ``before`` to a prompt of ``prompt`` tokens.

    ``opening`` is the work of prefilling the ``window``'s system prompt, whose tokens were kept if that is
    none. ``left`` tokens were removed; those after the slots are prefilled with the question. A chunk that
    arrived without a forward came from the store: its tokens count as turned.
    """
    was, anchor = {slot.number: slot for slot in before}, former_of(window).anchor.length
    kept, turned, patched, sampled = report.tokens_held + (0 if opening.tokens else anchor), 0, 0, 0
    for slot in report.slots:
        old = was.get(slot.number)
        if old is None or (old.antecedents, old.rank) != (slot.antecedents, slot.rank):
            patched += slot.length if slot.rank else 0
            sampled += 0 if slot.rank or slot.share is None else slot.length - round(slot.share * slot.length)
        elif old.position == slot.position:
            kept += slot.length
        else:
            turned += slot.length
    question = prompt - anchor - sum([slot.length for slot in report.slots])
    recomputed = opening.tokens + report.tokens_recomputed
    prefilled = min(prompt - kept - turned - patched - sampled, recomputed + question)
    return TurnReport(
        kept=kept,
        turned=prompt - kept - patched - sampled - prefilled,
        patched=patched,
        sampled=sampled,
        prefilled=prefilled,
        left=left,
        forwards=opening.forwards + report.forwards,
        tokens_recomputed=recomputed,
        vision_encodes=opening.vision_encodes + report.vision_encodes,
        seconds=opening.seconds + report.seconds,
        guarantee=weakest(slot.guarantee for slot in report.slots),
        mode=mode,
        notes=report.notes,
        admissions=admissions,
    )
