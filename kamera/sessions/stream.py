"""An answer as it is made: its tokens, and its text in pieces that no later token changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from kamera.engines import Engine

FinishReason = Literal["stop", "length"]
"""Why an answer ended: by itself or at a stop string, or because it may have no more tokens."""

_BROKEN = "�"


class Stream:
    """Follows one answer of `ChatSession.send`; a stopping criterion of ``generate``.

    ``stop`` are strings that end the answer: neither its text nor the history contains the one that did.
    Text from ``withhold`` on is not told before the answer is complete. A subclass overrides `tell`. Each
    answer takes a stream of its own. Beam search tells its text at the end, and no tokens.
    """

    def __init__(self, stop: Sequence[str] = (), withhold: str = "") -> None:
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise ValueError("a stop string has one character or more: give a sequence of such")
        self.stop = tuple(stop)
        self.ids: list[int] = []
        self.text = ""
        self.stopped = False
        self._withhold = withhold
        self._told = 0
        self._at = self._shown = 0  # the first token decoded again, and its characters in the text already
        self._searched = 0
        self._engine: Engine | None = None
        self._prompt = 0

    def tell(self, text: str) -> None:
        """Take the next piece of text, "" where a token completes none; called once a token and at the end.

        An error ends the answer and leaves the session as it was.
        """

    def begin(self, engine: Engine, prompt: int) -> None:
        """Follow the answer behind a prompt of ``prompt`` tokens."""
        self._engine, self._prompt = engine, prompt

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """True if a stop string has come, bool ``[rows]``; ``input_ids`` ``[rows, prompt + new]``."""
        if input_ids.shape[0] == 1:
            new = input_ids[0, self._prompt + len(self.ids) :].tolist()
            self._add(new)
            self.tell(self._ready())
        return torch.full((input_ids.shape[0],), self.stopped, device=input_ids.device)

    def finish(self, text: str) -> str:
        """Tell the rest, and give back the text of the answer, which is ``text`` up to the stop string."""
        if not self.stopped:  # characters that stayed incomplete
            self.text = text if text.startswith(self.text) or not self.ids else self.text
            self._cut()
        rest, self._told = self.text[self._told :], len(self.text)
        self.tell(rest)
        return self.text

    @property
    def finish_reason(self) -> FinishReason:
        """ "length" if the answer ended neither at a stop string nor with a special token."""
        if self.stopped or not self.ids or self._decoded(self.ids[-1:]) == "":
            return "stop"
        return "length"

    # -- inside --------------------------------------------------------------------------------

    def _decoded(self, ids: Sequence[int]) -> str:
        assert self._engine is not None, "begun"
        return self._engine.detokenize(torch.tensor(ids, dtype=torch.int64)) or ""

    def _add(self, ids: list[int]) -> None:
        """Extend the text by the characters that the tokens complete."""
        self.ids += ids
        if self.stopped:
            return
        text = self._decoded(self.ids[self._at :])
        whole = len(text) - text.endswith(_BROKEN)
        self.text += text[self._shown : whole]
        self._shown = max(self._shown, whole)
        if whole == len(text) and self.ids:  # the last token stays: some tokenizers join it with the next
            self._at = len(self.ids) - 1
            self._shown = len(self._decoded(self.ids[self._at :]))
        self._cut()

    def _cut(self) -> None:
        """End the text before the first stop string in it."""
        found = [at for s in self.stop if (at := self.text.find(s, max(0, self._searched - len(s)))) >= 0]
        self._searched = len(self.text)
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _ready(self) -> str:
        """The text that was not told, as far as it is neither withheld nor the beginning of a stop string."""
        end = len(self.text)
        if self._withhold and (at := self.text.find(self._withhold)) >= 0:
            end = at
        for mark in () if self.stopped else (*self.stop, self._withhold):
            begun = [n for n in range(1, len(mark)) if self.text.endswith(mark[:n])]
            end = min(end, len(self.text) - max(begun, default=0))
        piece = self.text[self._told : max(end, self._told)]
        self._told = max(end, self._told)
        return piece
