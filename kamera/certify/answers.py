"""Questions asked of a window, or of the KV that a faulty build would have served in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kamera.certify.probe import Query
from kamera.content import Encoded
from kamera.engines import Engine, LiveKV, Span
from kamera.ops import KV
from kamera.window import KameraWindow

ANSWER_TOKENS = 12
"""An answer is one word; this leaves room for "The answer is …"."""


class Asked(Protocol):
    """An object that answers questions."""

    def logits(self, texts: Sequence[str]) -> torch.Tensor:
        """Next-token logits ``[texts, vocabulary]``."""
        ...

    def words(self, text: str) -> str:
        """An answer in words."""
        ...


@dataclass(frozen=True, eq=False)
class Window:
    """A window as it is."""

    window: KameraWindow

    def logits(self, texts: Sequence[str]) -> torch.Tensor:
        """Next-token logits ``[texts, vocabulary]``."""
        return self.window.next_token_logits_of(texts)

    def words(self, text: str) -> str:
        """An answer in words."""
        return str(self.window.generate(text, max_new_tokens=ANSWER_TOKENS, do_sample=False))


@dataclass(frozen=True, eq=False)
class Instead:
    """The chunks of a window with other KV in their places.

    ``spans`` are that KV and ``chunks`` the encodings, in the window's order; neither is changed.
    """

    window: KameraWindow
    chunks: Sequence[Encoded]
    spans: Sequence[KV]

    def logits(self, texts: Sequence[str]) -> torch.Tensor:
        """Next-token logits ``[texts, vocabulary]``; questions of one length share a forward."""
        ids = [self._ids(text) for text in texts]
        rows: dict[int, torch.Tensor] = {}
        for length in sorted({len(i) for i in ids}):
            alike = [n for n, i in enumerate(ids) if len(i) == length]
            asked = torch.stack([ids[n] for n in alike])
            places = self._positions(asked[0])[:, -length:]
            logits = self._backbone.ask_each(asked, places, self._behind(length))
            rows |= dict(zip(alike, logits, strict=True))
        return torch.stack([rows[n] for n in range(len(ids))])

    def words(self, text: str) -> str:
        """An answer in words."""
        ids = self._ids(text)
        sequence, positions = torch.cat([self.window.input_ids, ids]), self._positions(ids)
        options = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False}
        behind = self._behind(len(ids) + ANSWER_TOKENS)
        (row,) = self._backbone.decode(sequence, positions, behind, (), **options).tokens
        return self._backbone.detokenize(row) or ""

    @property
    def _backbone(self) -> Engine:
        return self.window.backbone

    def _ids(self, text: str) -> torch.Tensor:
        return self._backbone.question_ids(text, self.window.anchor.tail)

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        """Positions of the window and a question behind it, ``[axes, tokens]``."""
        spans = [self.window.anchor.input_ids, *(c.input_ids for c in self.chunks), ids]
        return self._backbone.positions(spans, [{}, *(c.position_inputs for c in self.chunks), {}])

    def _behind(self, room: int) -> LiveKV:
        behind, still = self._backbone.live(), (0,) * self._backbone.axes
        behind.show([Span(kv, None, still) for kv in (self.window.anchor.kv, *self.spans)], room=room)
        return behind


def answers(asked: Asked, queries: Sequence[Query], backbone: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """The answer to each question ("" for none of its options), and the next-token logits ``[vocabulary]``.

    The likeliest next token is the answer if it names an option; else the model generates words.
    """
    logits = asked.logits([query.text for query in queries])
    for query, row in zip(queries, logits, strict=True):
        said = query.read(backbone.detokenize(row.argmax()[None].cpu()) or "")
        yield said or query.read(asked.words(query.text)), row
