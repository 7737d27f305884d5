"""An answer as it is made, its options, and the turn that it ends: text, calls, and cost."""

from __future__ import annotations

import inspect
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from kamera.content import MOST_LIKELY
from kamera.engines import Engine, Spent
from kamera.errors import quote
from kamera.reuse import Admission
from kamera.sessions.grammar import Bound, CallForm, Calls, Mask
from kamera.sessions.layout import Applied
from kamera.trust import Guarantee, weakest
from kamera.window import KameraWindow, Report, Slot, former_of

FinishReason = Literal["stop", "length"]
"""Why an answer ended: by itself or at a stop string, or because it may have no more tokens."""

_BROKEN = "�"


class Logprob(NamedTuple):
    """A token of an answer, and the ``likeliest`` ones at its place, the likeliest first.

    Logarithms (natural) are of the model's own probabilities: of its logits, after penalties that its
    settings ask for, before temperature, ``top_k`` and ``top_p``.
    """

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


class Stream:
    """Follows one answer of `ChatSession.send`; a stopping criterion of ``generate``.

    ``stop`` are strings that end the answer: neither its text nor the history contains the one that did.
    ``stopped`` is that one. With ``calls``, the form of tool calls, text from a call on is not told, nor
    white space before it: ``told`` is the number of characters that were, and `Turn.content` has the rest.
    With ``single`` the first call ends the answer. ``steps`` is the number of tokens up to now, ``seconds``
    the time from the request to the first token's logits (None before). A subclass overrides `tell`. Each
    answer takes a stream of its own. Beam search tells its text at the end, and no tokens.
    """

    def __init__(
        self, stop: Sequence[str] = (), calls: CallForm | None = None, *, single: bool = False
    ) -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError("a stop string has one character or more: give a sequence of such")
        self.stop = tuple(stop)
        self.ids: list[int] = []
        self.text = ""
        self.stopped: str | None = None
        self._calls, self._single = calls, single
        self._mask: Mask | None = None
        self._complete = False  # by its grammar, or by its first call
        self.told = 0
        self._at = self._length = 0  # the first token decoded again, and its characters in the text already
        self._search_start = 0
        self.steps = 0
        self.seconds: float | None = None
        self._engine: Engine | None = None
        self._start_time, self._prompt = 0.0, 0
        self._most: int | None = None
        self._logprobs: list[Logprob] = []
        self._next: torch.Tensor | None = None  # log probabilities of the token that comes

    def tell(self, text: str) -> None:
        """Take the next piece of text, "" where a token completes none; called once a token and at the end.

        An error ends the answer and leaves the session as it was.
        """

    def begin(self, engine: Engine, likeliest: int | None = None, mask: Mask | None = None) -> None:
        """Follow a request from now on, noting the ``likeliest`` tokens; ValueError for a second one.

        ``mask`` keeps the answer to its grammar, and ends it where the grammar does.
        """
        if self.steps:
            raise ValueError("this stream has followed an answer: give each answer a stream of its own")
        self._engine, self._most, self._start_time = engine, likeliest, time.perf_counter()
        self._mask = mask

    def watch(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores``, under the mask if there is one: a logits processor, in front of all others."""
        if self.seconds is None:
            self.seconds = time.perf_counter() - self._start_time
            self._prompt = input_ids.shape[1]
        self.steps += 1
        if self._most is not None:
            self._note(input_ids[0, -1:].tolist())
            self._next = scores[0].float().log_softmax(-1)
        return scores if self._mask is None else self._mask(input_ids, scores)

    @property
    def logprobs(self) -> tuple[Logprob, ...] | None:
        """Those of the answer, which has ended, one for each token; None if they were not asked for."""
        self._note(self.ids[-1:])
        return None if self._most is None else tuple(self._logprobs)

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """True if the answer ends here, bool ``[rows]``; ``input_ids`` ``[rows, prompt + new]``."""
        if input_ids.shape[0] == 1:
            for token in input_ids[0, self._prompt + len(self.ids) :].tolist():
                if not self.stopped:
                    self._add([token])
            if self._mask is not None:
                self._complete = self._mask.follow(input_ids)
            elif self._single and self._calls is not None:
                withheld = self._calls.safe_length(self.text) < len(self.text.rstrip())
                self._complete = withheld and any(self._calls.find(self.text, {}))
            self.tell(self._ready())
        is_over = self._complete or self.stopped is not None
        return torch.full((input_ids.shape[0],), is_over, device=input_ids.device)

    def finish(self, text: str) -> str:
        """Tell the rest, unless calls are withheld; the text of the answer: ``text`` up to a stop string."""
        if not self.stopped:  # characters that stayed incomplete
            self.text = text if text.startswith(self.text) or not self.ids else self.text
            self._cut()
        if self._calls is None:
            rest, self.told = self.text[self.told :], len(self.text)
            self.tell(rest)
        return self.text

    def text_with_calls(self, text: str, calls: CallForm) -> str:
        """The answer's ``text``, with special tokens that belong to calls."""
        if self._engine is None or not self.ids or not calls.special:
            return text
        whole = calls.decode(self._engine, self.ids)
        return whole if self.stopped is None else whole.partition(self.stopped)[0]

    def finish_reason(self, limit: int | None, closing: Container[int]) -> FinishReason:
        """Why the answer ended, which may have ``limit`` tokens, and ends with one of ``closing``."""
        if self._complete or self.stopped is not None or not self.ids or self.ids[-1] in closing:
            return "stop"
        return "stop" if limit is not None and len(self.ids) < limit else "length"

    # -- inside --------------------------------------------------------------------------------

    def _note(self, last: Sequence[int]) -> None:
        if self._next is not None and last:
            values, places = self._next.topk(self._most or 0)
            likeliest = tuple(zip(places.tolist(), values.tolist(), strict=True))
            self._logprobs.append(Logprob(last[0], float(self._next[last[0]]), likeliest))
            self._next = None

    def _decode(self, ids: Sequence[int]) -> str:
        assert self._engine is not None, "begun"
        if self._calls is not None:
            return self._calls.decode(self._engine, ids)
        return self._engine.builder.detokenize(torch.tensor(ids, dtype=torch.int64)) or ""

    def _add(self, ids: list[int]) -> None:
        """Extend the text by the characters that the tokens complete."""
        self.ids += ids
        if self.stopped:
            return
        text = self._decode(self.ids[self._at :])
        whole = len(text) - text.endswith(_BROKEN)
        self.text += text[self._length : whole]
        self._length = max(self._length, whole)
        if whole == len(text) and self.ids:  # the last token stays: some tokenizers join it with the next
            self._at = len(self.ids) - 1
            self._length = len(self._decode(self.ids[self._at :]))
        self._cut()

    def _cut(self) -> None:
        """End the text before the first stop string in it."""
        places = [(self.text.find(s, max(0, self._search_start - len(s))), s) for s in self.stop]
        self._search_start = len(self.text)
        at, stop_string = min((place for place in places if place[0] >= 0), default=(0, None))
        if stop_string is not None:
            self.text, self.stopped = self.text[:at], stop_string

    def _ready(self) -> str:
        """The text that was not told, as far as it begins neither a call nor a stop string."""
        end = len(self.text)
        for mark in () if self.stopped else self.stop:
            lengths = [n for n in range(1, len(mark)) if self.text.endswith(mark[:n])]
            end = min(end, len(self.text) - max(lengths, default=0))
        if self._calls is not None:
            end = min(self._calls.safe_length(self.text), len(self.text[:end].rstrip()))
        piece = self.text[self.told : max(end, self.told)]
        self.told = max(end, self.told)
        return piece


Options = Mapping[str, Any]
"""Options of an answer."""

_LARGEST = 2**63


class Seeded:
    """A logits processor that draws each token itself: greedy decoding behind it takes the one it left."""

    def __init__(self, seed: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool) or not -_LARGEST <= seed < _LARGEST:
            raise ValueError(f"seed={quote(seed)}: give a whole number of 64 bits")
        self._draws = torch.Generator().manual_seed(seed)
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[rows, vocabulary]`` of which one in each row is left."""
        logits = scores.float().cpu() / self._temperature
        if 0 < self._top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self._top_k).values[:, -1:], -torch.inf)
        if self._top_p < 1.0:
            probabilities, places = logits.softmax(-1).sort(descending=True)
            late = probabilities.cumsum(-1) - probabilities >= self._top_p
            late[:, 0] = False
            logits = logits.masked_fill(torch.zeros_like(late).scatter(-1, places, late), -torch.inf)
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=self._draws).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(-1, tokens, 0.0)


class Watched:
    """The logits processor of a stream: transformers reads the signature of a method anew at each token."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As `Stream.watch`."""
        return self._stream.watch(input_ids, scores)


def refuse_own_options(options: Mapping[str, Any], owner: type[Any]) -> None:
    """Raise ValueError for an option of an answer that is one of ``owner``'s construction."""
    own = inspect.signature(owner.__init__).parameters.keys() - {"self", "max_tokens"}
    for name in options.keys() & own:
        raise ValueError(
            f"{name}={quote(options[name])} is no option of an answer: give it to {owner.__name__}({name}=…)"
        )


def generate_options(
    engine: Engine,
    stream: Stream,
    options: dict[str, Any],
    seed: int | None,
    most: int | None,
    bound: Bound | None,
) -> dict[str, Any]:
    """Options of ``generate`` for an answer drawn with ``seed``, which ``stream`` follows from now on.

    ``most`` is the number of likeliest tokens to note; ``bound``, if there is one, the answer's grammar.
    Raises ValueError for what an answer does not take.
    """
    engine.check_sampling(options)
    if int(options.get("num_return_sequences") or 1) > 1:
        raise ValueError(f"num_return_sequences={options['num_return_sequences']}: a turn has one answer")
    is_count = isinstance(most, int) and not isinstance(most, bool) and 0 <= most <= MOST_LIKELY
    if most is not None and not is_count:
        raise ValueError(f"logprobs={quote(most)}: give the number of likeliest tokens, 0 to {MOST_LIKELY}")
    config = options.get("generation_config") or engine.builder.generation_config
    beams = int(options.get("num_beams") or getattr(config, "num_beams", None) or 1)
    if beams > 1 and (most is not None or bound is not None):
        raise ValueError("logprobs and grammars are of an answer made token by token: use no beams")
    stream.begin(engine, most, None if bound is None else bound.mask(engine, closing_ids(engine, options)))
    if "stop_strings" in options:
        processor = engine.processor
        options = {"tokenizer": getattr(processor, "tokenizer", processor), **options}
    options = with_seed(options, seed)
    return {
        **options,
        "logits_processor": [Watched(stream), *(options.get("logits_processor") or ())],
        "stopping_criteria": [*(options.get("stopping_criteria") or ()), stream],
    }


def closing_ids(engine: Engine, options: Options) -> frozenset[int]:
    """Ids of the tokens that end an answer, as its options, the model's settings and its tokenizer say."""
    processor, config = engine.processor, options.get("generation_config")
    named = options.get("eos_token_id") or getattr(config, "eos_token_id", None)
    named = named or getattr(engine.builder.generation_config, "eos_token_id", None)
    tokenizers = getattr(getattr(processor, "tokenizer", processor), "eos_token_id", None)
    ids = named if isinstance(named, list | tuple) else [named]
    return frozenset(i for i in (*ids, tokenizers) if isinstance(i, int))


def with_seed(options: dict[str, Any], seed: int | None) -> dict[str, Any]:
    """Options of an answer whose tokens are drawn with ``seed``; as they are without one, or if greedy.

    Temperature, top_k and top_p are those of ``options``, else 1.0, none and none. Raises ValueError for a
    seed that is no whole number, and for a temperature of 0.
    """
    if seed is None:
        return options
    names = ("temperature", "top_k", "top_p")
    sampler = Seeded(seed, **{name: options[name] for name in names if options.get(name) is not None})
    if not options.get("do_sample", True):
        return options
    if options.get("temperature") == 0:
        raise ValueError("temperature=0 with a seed: use do_sample=False for the likeliest tokens")
    rest = {name: value for name, value in options.items() if name not in (*names, "do_sample")}
    return {
        **rest,
        "do_sample": False,
        "logits_processor": [*(rest.get("logits_processor") or ()), sampler],
    }


@dataclass(frozen=True)
class TurnReport:
    """Cost of bringing the cache to a turn's prompt.

    Tokens of the prompt, each counted once: ``kept`` in place, ``turned`` (relocated), ``patched`` (a stored
    patch for new antecedents, no forward), ``prefilled``. ``left`` are tokens that the prompt no longer has.
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


def read_answer(
    text: str, stream: Stream, form: CallForm, tools: Sequence[Any] | None
) -> tuple[str, str, Calls, dict[str, Any]]:
    """The answer ``text`` up to a stop string, what of it is no tool call, the calls, and its message.

    In the history it is as it was said. Special tokens cannot be: the template is given calls with them.
    """
    text = stream.finish(text)
    content, calls = form.parse(stream.text_with_calls(text, form), tools)
    text = form.without_special_tokens(text)
    fields = {"content": content, "tool_calls": list(calls)} if form.special and calls else {"content": text}
    return text, content, calls, {"role": "assistant", **fields}


def turn_report(
    old_slots: Sequence[Slot],
    report: Report,
    window: KameraWindow,
    opening: Spent,
    prompt: int,
    mode: Applied,
    admissions: tuple[Admission, ...] = (),
) -> TurnReport:
    """The report of an operation from the ``old_slots`` to a prompt of ``prompt`` tokens.

    ``opening`` is the work of prefilling the ``window``'s system prompt, whose other tokens were kept. Those
    after the slots are prefilled with the question. A chunk that arrived without a forward came from the
    store: its tokens count as turned.
    """
    old_by_number, anchor = {slot.number: slot for slot in old_slots}, former_of(window).anchor.length
    kept, turned, patched = report.tokens_held + anchor - opening.tokens, 0, 0
    for slot in report.slots:
        old = old_by_number.get(slot.number)
        if old is None or (old.antecedents, old.rank) != (slot.antecedents, slot.rank):
            patched += slot.length if slot.rank else 0
        elif old.position == slot.position:
            kept += slot.length
        else:
            turned += slot.length
    question = prompt - anchor - sum([slot.length for slot in report.slots])
    recomputed = opening.tokens + report.tokens_recomputed
    prefilled = min(prompt - kept - turned - patched, recomputed + question)
    return TurnReport(
        kept=kept,
        turned=prompt - kept - patched - prefilled,
        patched=patched,
        prefilled=prefilled,
        forwards=opening.forwards + report.forwards,
        tokens_recomputed=recomputed,
        vision_encodes=opening.vision_encodes + report.vision_encodes,
        seconds=opening.seconds + report.seconds,
        guarantee=weakest(slot.guarantee for slot in report.slots),
        mode=mode,
        notes=report.notes,
        admissions=admissions,
    )
