"""Questions asked of a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kamera.certify.probe import Query
from kamera.window import KameraWindow, former_of, next_token_logits_of

ANSWER_TOKENS = 12
"""An answer is one word; this leaves room for "The answer is …"."""


def answers(window: KameraWindow, queries: Sequence[Query]) -> list[tuple[str, torch.Tensor]]:
    """The answer to each question ("" for none of its options), and the next-token logits ``[vocabulary]``.

    The likeliest next token is the answer if it names an option; else the model generates words.
    """
    backbone, made = former_of(window).backbone, []
    rows = next_token_logits_of(window, [query.text for query in queries])
    for query, row in zip(queries, rows, strict=True):
        answer = query.read(backbone.builder.detokenize(row.argmax()[None].cpu()) or "")
        words = "" if answer else window.generate(query.text, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        made.append((answer or query.read(str(words)), row))
    return made
