"""Search by question: the archived chunk behind which the model answers with the most certainty.

The model itself reads each canonical where it was computed, right behind the anchor: no second encoder, no
vision encode, and one forward of the question's few tokens per chunk. Attention to the keys alone finds the
right kind of frame but not the right frame (docs/search.md reports both).
"""

from __future__ import annotations

import torch

from kamera.engines import LiveKV, Span
from kamera.errors import CorruptChunk, IncompatibleChunk, UnknownChunk, quote
from kamera.patches import Former, settle, text_positions
from kamera.store import Hit

MOST = 256
"""Maximum of archived chunks that a question is asked of: the latest ones."""


def answering(former: Former, question: torch.Tensor, k: int) -> list[Hit]:
    """The ``k`` chunks archived behind the former's anchor that answer ``question`` best, best first.

    ``question`` are token ids ``[tokens]``. The score is the highest probability among first tokens of the
    answer, 0.0 to 1.0. A chunk whose canonical cannot be read is left out.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k={quote(k)} hits: ask for at least 1")
    settle(former)
    rows = former.store.ls("canonical", context=former.context)[-MOST:]
    behind = former.backbone.live()
    with former.operation():
        hits = [Hit(row.chunk_id, _certainty(former, row.chunk_id, question, behind)) for row in rows]
    return sorted((hit for hit in hits if hit.score > 0.0), key=lambda hit: -hit.score)[:k]


def _certainty(former: Former, chunk_id: str, question: torch.Tensor, behind: LiveKV) -> float:
    try:
        facts = former.known(chunk_id)
    except (UnknownChunk, IncompatibleChunk, CorruptChunk):
        return 0.0
    backbone, canonical = former.backbone, former.canonical(facts)
    behind.show([former.anchor_span, Span(canonical.kv, None, (0,) * backbone.axes)], room=question.shape[0])
    positions = text_positions(backbone, former.anchor.input_ids, [facts], question)
    return float(backbone.ask(question, positions, behind).float().softmax(-1).max())
