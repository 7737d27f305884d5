"""The proof of a patch: what the model says behind the KV it makes, against the KV it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

DECIDED = 0.1
"""Lead of the likeliest token, in nats, from which on another likeliest token counts as a flip.

Nearer ones change places by rounding alone at half precision.
"""

_WORST = 1e30

_SHARE = 2**22
"""Logits compared at a time: a vocabulary of 150,000 and a long question would not fit otherwise."""


@dataclass(frozen=True)
class Proof:
    """How far what the model says behind patched KV is from what it says behind the true KV.

    ``kl`` is the largest divergence of one next-token distribution, in nats, over ``tokens`` tokens of
    ``questions`` questions; ``flips`` is the number of tokens whose likeliest successor is another one,
    although the true one led by `DECIDED`.
    """

    kl: float
    flips: int
    questions: int
    tokens: int

    def within(self, tolerance: float) -> bool:
        """True if something was asked, nothing flipped, and no token diverged by more than ``tolerance``."""
        return self.tokens > 0 and self.flips == 0 and self.kl <= tolerance  # false for a NaN

    def to_info(self) -> dict[str, Any]:
        """The proof as written to a record's ``info``."""
        return {"proof": asdict(self)}

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Proof | None:
        """The proof in a record's ``info`` (any JSON to the format); None if it holds no valid one."""
        told = info.get("proof")
        if not isinstance(told, Mapping) or told.keys() != {"kl", "flips", "questions", "tokens"}:
            return None
        counts = [told[name] for name in ("flips", "questions", "tokens")]
        if type(told["kl"]) not in (int, float) or any(type(n) is not int or n < 0 for n in counts):
            return None
        return cls(float(told["kl"]), *counts)


def compared(true: Sequence[torch.Tensor], patched: Sequence[torch.Tensor]) -> Proof:
    """The proof from logits ``[tokens, vocabulary]`` of each question, behind the true and the patched KV."""
    kl, flips, tokens = 0.0, 0, 0
    for want, got in zip(true, patched, strict=True):
        for p, q in zip(_parts(want), _parts(got), strict=True):
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            each = (p.exp() * (p - q)).sum(-1)
            # a NaN must not be lost in a maximum, nor be written to a header
            kl = max(kl, float(each.max())) if bool(each.isfinite().all()) else _WORST
            best, said = p.max(-1), q.argmax(-1, keepdim=True)
            flips += int((best.values - p.gather(-1, said)[:, 0] > DECIDED).sum())
            tokens += p.shape[0]
    return Proof(kl, flips, len(true), tokens)


def _parts(logits: torch.Tensor) -> Sequence[torch.Tensor]:
    return logits.split(max(1, _SHARE // logits.shape[-1]))
