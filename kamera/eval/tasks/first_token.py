"""How far an arm's first token lies from the re-prefill's, from what a line of a journal can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

KEPT = 64
"""Tokens of a distribution that are kept by name; the others are kept as one."""


@dataclass(frozen=True)
class FirstToken:
    """Log-probabilities of the likeliest tokens of an answer's beginning, and of all others together.

    ``rest`` is None where ``ids`` are the whole vocabulary.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    rest: float | None

    @classmethod
    def of(cls, logits: torch.Tensor, kept: int = KEPT) -> FirstToken:
        """The ``kept`` likeliest of logits ``[vocabulary]``."""
        ids = tuple(logits.topk(min(kept, logits.shape[0])).indices.tolist())
        return cls(ids, *_grouped(logits, ids))

    def kl(self, arm: torch.Tensor) -> float:
        """KL(arm ‖ this) in nats of an arm's logits ``[vocabulary]``, all tokens not named taken as one.

        Never more than the KL over the whole vocabulary, and equal to it where that is named.
        """
        named, rest = _grouped(arm, self.ids)
        pairs = list(zip(named, self.log_probs, strict=True))
        if rest is not None and self.rest is not None:
            pairs.append((rest, self.rest))
        p, q = (torch.tensor(side, dtype=torch.float64) for side in zip(*pairs, strict=True))
        return max(float((p.exp() * (p - q)).sum()), 0.0)


def _grouped(logits: torch.Tensor, ids: tuple[int, ...]) -> tuple[tuple[float, ...], float | None]:
    logs = torch.log_softmax(logits.double().cpu(), -1)
    named = torch.zeros_like(logs, dtype=torch.bool)
    named[list(ids)] = True
    rest = None if bool(named.all()) else float(torch.logsumexp(logs[~named], -1))
    return tuple(logs[list(ids)].tolist()), rest
