"""Forwards of text spans for measurements: prefills behind given KV, answers, and texts to run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kamera.content import Encoded
from kamera.engines import Engine, LiveKV, Span
from kamera.engines.hf import HfEngine
from kamera.ops import KV, kv_tokens


def places(backbone: Engine, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Positions of text spans one after another, each ``[axes, tokens]``."""
    whole = backbone.positions([torch.zeros(sum(lengths), dtype=torch.int64)], [{}])
    return list(whole.split(list(lengths), dim=1))


def prefilled(backbone: Engine, ids: torch.Tensor, positions: torch.Tensor, behind: Sequence[KV] = ()) -> KV:
    """KV of text ``ids`` ``[tokens]`` at ``positions`` behind spans that stand where they were computed."""
    live = shown(backbone, behind, len(ids)) if any(map(kv_tokens, behind)) else None
    return backbone.prefill([Encoded(ids, {}, {})], [positions], live)[0]


def answered(
    backbone: Engine, ids: torch.Tensor, positions: torch.Tensor, behind: Sequence[KV]
) -> torch.Tensor:
    """Log-probabilities ``[vocabulary]``, float64, of the token after ``ids``."""
    logits = backbone.ask([ids], positions, shown(backbone, behind, len(ids)))[0][-1]
    return torch.log_softmax(logits.double(), -1)


def divergence(truth: torch.Tensor, said: torch.Tensor) -> float:
    """KL(truth ‖ said) in nats, of log-probabilities ``[vocabulary]``."""
    return float((truth.exp() * (truth - said)).sum().clamp(min=0.0))


def shown(backbone: Engine, spans: Sequence[KV], room: int) -> LiveKV:
    """A live KV that shows ``spans`` where they were computed."""
    live = backbone.live()
    live.show([Span(kv, None, (0,) * backbone.axes) for kv in spans], room=room)
    return live


def texts(
    backbone: HfEngine, count: int, length: int, *, text: str | None = None, seed: int = 0
) -> list[torch.Tensor]:
    """``count`` runs of ``length`` token ids: out of ``text``, spread evenly, else drawn at random.

    Random ids show what a model's shapes and positions do, not its habits: give it text of its own kind.
    Raises `ValueError` for a text that is too short.
    """
    if text is None:
        size = backbone.builder.token_count
        generator = torch.Generator().manual_seed(seed)
        special = set(
            getattr(getattr(backbone.processor, "tokenizer", backbone.processor), "all_special_ids", ())
        )
        usable = torch.tensor(
            sorted(set(range(min(3, size - 1), size)) - special - {*backbone.builder.vision_tokens})
        )
        return [usable[torch.randint(len(usable), (length,), generator=generator)] for _ in range(count)]
    ids = backbone.builder.tokenize(text)
    if len(ids) < length + count - 1:
        raise ValueError(
            f"the text has {len(ids)} tokens, {count} runs of {length} need {length + count - 1}: give a "
            "longer text"
        )
    step = (len(ids) - length) / max(1, count - 1)
    return [ids[int(i * step) : int(i * step) + length] for i in range(count)]
