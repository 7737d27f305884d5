"""Accuracy by question kind on packed windows, with everything in view or something taken away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from .batches import Batch, additive, embed, pack
from .frontend import SYSTEM_PROMPTS
from .world import Episode, Question

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
def answer_logits(
    model: Qwen2_5_VLForConditionalGeneration,
    batch: Batch,
    mask: torch.Tensor,
    embeddings: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits where the answers are read, `[b, q, vocabulary]`."""
    hidden = model.model.language_model(
        inputs_embeds=embed(model, batch) if embeddings is None else embeddings,
        position_ids=batch.positions.expand(-1, len(batch.episodes), -1),
        attention_mask=additive(mask),
        use_cache=False,
    ).last_hidden_state
    return model.lm_head(hidden[:, batch.read])


def kind_of(question: Question) -> str:
    """`value` questions whose answer a legend gave are counted apart, as `bound`."""
    if question.kind == "value":
        return "bound" if question.bound else "default"
    return question.kind


def accuracy(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    episodes: Sequence[Episode],
    masks: dict[str, MaskOf],
    *,
    questions: int = 24,
    seed: int = 0,
    batch_size: int = 12,
) -> dict[str, dict[str, float]]:
    """Share of right answers, `{mask name: {kind: accuracy}}`, with `n` questions per kind.

    Episodes share a layout. The answer is the most likely of all tokens. Kinds are `bound` and
    `default` (together `value`, the two-hop questions), `glyph` and `colour`.
    """
    rng = np.random.default_rng(seed)
    right: dict[str, Counter[str]] = {name: Counter() for name in masks}
    total: Counter[str] = Counter()
    kinds, shares = ("value", "glyph", "colour"), (0.5, 0.25, 0.25)
    for first in range(0, len(episodes), batch_size):
        group = episodes[first : first + batch_size]
        asked = [some_questions(episode, questions, rng, kinds, shares) for episode in group]
        batch = pack(model, tokenizer, group, asked, SYSTEM_PROMPTS[0])
        with torch.no_grad():
            embeddings = embed(model, batch)
        names = [kind_of(question) for row in asked for question in row]
        total.update(names)
        for name, mask_of in masks.items():
            logits = answer_logits(model, batch, mask_of(batch), embeddings)
            hits = (logits.argmax(-1) == batch.answers).flatten().tolist()
            right[name].update(kind for kind, hit in zip(names, hits, strict=True) if hit)
    result: dict[str, dict[str, float]] = {"n": dict(total)}
    for name, hits_by_kind in right.items():
        result[name] = {kind: hits_by_kind[kind] / count for kind, count in total.items()}
        two_hop = hits_by_kind["bound"] + hits_by_kind["default"]
        result[name]["value"] = two_hop / max(total["bound"] + total["default"], 1)
    return result
