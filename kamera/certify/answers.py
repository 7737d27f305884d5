"""Questions asked of a window, or of the KV that a faulty build would have served in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kamera.certify.probe import Query
from kamera.content import Encoded
from kamera.engines import Engine, LiveKV, Span
from kamera.ops import KV
from kamera.window import KameraWindow, former_of, next_token_logits_of, sequence_of

ANSWER_TOKENS = 12
"""An answer is one word; this leaves room for "The answer is …"."""


@dataclass(frozen=True, eq=False)
class Instead:
    """The chunks of a window with other KV in their places.

    ``spans`` are that KV and ``chunks`` the encodings, in the window's order; neither is changed.
    """

    window: KameraWindow
    chunks: Sequence[Encoded]
    spans: Sequence[KV]

    @property
    def backbone(self) -> Engine:
        """The window's."""
        return former_of(self.window).backbone

    def next_token_logits_of(self, texts: Sequence[str]) -> torch.Tensor:
        """Next-token logits ``[texts, vocabulary]``; the questions share forwards."""
        ids = [self._ids(text) for text in texts]
        longest = max(ids, key=len)
        places = self._positions(longest)[:, -len(longest) :]
        followed = self.backbone.follow(ids, places, self._behind(len(longest)))
        return torch.stack([row[-1] for row in followed])

    def generate(self, text: str, **options: Any) -> str:
        """An answer in words."""
        ids = self._ids(text)
        sequence, positions = torch.cat([sequence_of(self.window).input_ids, ids]), self._positions(ids)
        behind = self._behind(len(ids) + int(options["max_new_tokens"]))
        (row,) = self.backbone.decode(sequence, positions, behind, (), **options).tokens
        return self.backbone.detokenize(row) or ""

    def _ids(self, text: str) -> torch.Tensor:
        return self.backbone.builder.question_ids(text, former_of(self.window).anchor.tail)

    def _positions(self, ids: torch.Tensor) -> torch.Tensor:
        """Positions of the window and a question behind it, ``[axes, tokens]``."""
        spans = [former_of(self.window).anchor.input_ids, *(c.input_ids for c in self.chunks), ids]
        return self.backbone.positions(spans, [{}, *(c.position_inputs for c in self.chunks), {}])

    def _behind(self, room: int) -> LiveKV:
        behind, still = self.backbone.live(), (0,) * self.backbone.axes
        behind.show(
            [Span(kv, None, still) for kv in (former_of(self.window).anchor.kv, *self.spans)], room=room
        )
        return behind


def answers(window: KameraWindow | Instead, queries: Sequence[Query]) -> list[tuple[str, torch.Tensor]]:
    """The answer to each question ("" for none of its options), and the next-token logits ``[vocabulary]``.

    The likeliest next token is the answer if it names an option; else the model generates words.
    """
    made, texts = [], [query.text for query in queries]
    if isinstance(window, Instead):
        backbone, rows = window.backbone, window.next_token_logits_of(texts)
    else:
        backbone, rows = former_of(window).backbone, next_token_logits_of(window, texts)
    for query, row in zip(queries, rows, strict=True):
        answer = query.read(backbone.detokenize(row.argmax()[None].cpu()) or "")
        words = "" if answer else window.generate(query.text, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        made.append((answer or query.read(str(words)), row))
    return made
