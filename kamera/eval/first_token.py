"""Divergence of an arm's first token from the re-prefill's, from a summary that fits in a journal line."""

from __future__ import annotations

from dataclasses import dataclass

import torch

KEPT = 64
"""Number of tokens of a distribution that are kept; the others are summed."""


@dataclass(frozen=True)
class FirstToken:
    """Log-probabilities of the most likely first tokens of an answer, and of all others together.

    ``rest`` is None if ``ids`` are the whole vocabulary.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    rest: float | None

    @classmethod
    def of(cls, logits: torch.Tensor, kept: int = KEPT) -> FirstToken:
        """The ``kept`` most likely tokens of logits ``[vocabulary]``."""
        ids = tuple(logits.topk(min(kept, logits.shape[0])).indices.tolist())
        return cls(ids, *_group(logits, ids))

    def again(self, arm: torch.Tensor) -> FirstToken:
        """The same tokens of an arm's logits ``[vocabulary]``, and all others together."""
        return FirstToken(self.ids, *_group(arm, self.ids))

    def kl_to(self, other: FirstToken) -> float:
        """KL(this ‖ other) in nats of two summaries that name the same tokens, all others as one.

        A lower bound of the KL over the whole vocabulary, and equal to it if all tokens are kept. Raises
        ValueError for different ids.
        """
        if self.ids != other.ids:
            raise ValueError("two first tokens name different ids: summarise both over the same")
        pairs = list(zip(self.log_probs, other.log_probs, strict=True))
        if self.rest is not None and other.rest is not None:
            pairs.append((self.rest, other.rest))
        p, q = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
        return max(float((p.exp() * (p - q)).sum()), 0.0)


def _group(logits: torch.Tensor, ids: tuple[int, ...]) -> tuple[tuple[float, ...], float | None]:
    logs = torch.log_softmax(logits.double().cpu(), -1)
    named = torch.zeros_like(logs, dtype=torch.bool)
    named[list(ids)] = True
    rest = None if bool(named.all()) else float(torch.logsumexp(logs[~named], -1))
    return tuple(logs[list(ids)].tolist()), rest
