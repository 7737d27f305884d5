"""An answer as it is made: its tokens, and its text in pieces that no later token changes."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from typing import Literal, NamedTuple

import torch

from kamera.engines import Engine
from kamera.sessions.grammar import Mask
from kamera.sessions.tool_calls import CallForm

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
