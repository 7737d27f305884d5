"""Accuracy by question kind on packed windows, with everything in view or something taken away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from benchmarks.testbed.batches import Batch, additive, pack, vision_inputs
from benchmarks.testbed.frontend import SYSTEM_PROMPTS
from kamera.testbed.world import Episode, Question

MaskOf = Callable[[Batch], torch.Tensor]


def some_questions(
    episode: Episode, count: int, rng: np.random.Generator, kinds: Sequence[str], shares: Sequence[float]
) -> list[Question]:
    """`count` questions of these kinds, each kind with its share; a kind may be missing."""
    subjects = {kind: episode.subjects([kind]) for kind in kinds}
    weights = np.array([share * bool(subjects[kind]) for kind, share in zip(kinds, shares, strict=True)])
    picked = rng.choice(len(kinds), size=count, p=weights / weights.sum())
    return [episode.ask(*subjects[kinds[at]][rng.integers(len(subjects[kinds[at]]))]) for at in picked]


@torch.no_grad()
def answer_logits(model: Any, batch: Batch, mask: torch.Tensor) -> torch.Tensor:
    """Logits where the answers are read, `[b, q, vocabulary]`."""
    return torch.as_tensor(model.lm_head(decode(model, batch, mask)[:, batch.read]))


def decode(
    model: Any, batch: Batch, mask: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Last hidden states `[b, s, hidden]` of the whole model under a boolean mask."""
    positions = batch.positions.unsqueeze(1).expand(-1, len(batch.episodes), -1)
    outputs = model.model(
        input_ids=batch.input_ids,
        position_ids=positions,
        attention_mask=additive(mask),
        use_cache=False,
        **vision_inputs(batch, generator),
    )
    return torch.as_tensor(outputs.last_hidden_state)


def kind_of(question: Question) -> str:
    """`value` questions are counted by their hops, those that fall back to the default apart."""
    if question.kind == "value":
        return f"{question.hops} hops" if question.bound else "default"
    return question.kind


def accuracy(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[Episode],
    masks: dict[str, MaskOf],
    *,
    questions: int = 24,
    seed: int = 0,
    batch_size: int = 8,
    kinds: Sequence[str] = ("value", "glyph", "colour"),
    shares: Sequence[float] = (0.6, 0.2, 0.2),
) -> dict[str, dict[str, float]]:
    """Share of right answers, `{mask name: {kind: accuracy}}`, with `n` questions per kind.

    Episodes share a layout; each of `kinds` has its share of the questions asked. The answer is the
    most likely of all tokens. Kinds are counted as `2 hops`, `3 hops` and `default` (together `value`),
    `glyph`, `colour` and those about the order of frames.
    """
    rng = np.random.default_rng(seed)
    right: dict[str, Counter[str]] = {name: Counter() for name in masks}
    total: Counter[str] = Counter()
    for first in range(0, len(episodes), batch_size):
        group = episodes[first : first + batch_size]
        asked = [some_questions(episode, questions, rng, kinds, shares) for episode in group]
        batch = pack(model, tokenizer, group, asked, SYSTEM_PROMPTS[0])
        names = [(question.kind, kind_of(question)) for row in asked for question in row]
        for kind, name in names:
            total.update({kind, name})
        for mask, mask_of in masks.items():
            logits = answer_logits(model, batch, mask_of(batch))
            hits = (logits.argmax(-1) == batch.answers).flatten().tolist()
            for (kind, name), hit in zip(names, hits, strict=True):
                right[mask].update({kind, name} if hit else ())
    scores = {
        mask: {kind: hits[kind] / count for kind, count in total.items()} for mask, hits in right.items()
    }
    return {"n": dict(total), **scores}
