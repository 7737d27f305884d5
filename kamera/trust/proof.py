"""The proof of a patch: the KV it makes and what the model says behind it, against the true KV.

Answers alone do not bound what was not asked, so the KV itself is held to a bound, too: at every token of
every layer and channel. Together they are the proof; neither is one for questions that read the KV in another
way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from einops import rearrange

from kamera.ops import KV, Deltas
from kamera.trust.sketch import alike, is_sketch, kinds

DECIDED = 0.1
"""Lead of the likeliest token, in nats, from which on another likeliest token counts as a flip.

Nearer ones change places by rounding alone at half precision.
"""

KV_BOUND = 0.25
"""Largest error of KV (`kv_error`) that answers can prove.

On six backbones, unled ones included, what the default budget forms has at most 0.23, patches of rank 16 have
0.55 and more, and of the wrong builds the one that answers hide best has 0.31 and more (docs/proofs.md).
"""

NEAR_EXACT = 0.2
"""Error of KV up to which a proof holds on few questions, and for those that are unlike.

What the default budget forms on the shipped backbone has at most 0.18.
"""

LEAST_KINDS = 4
"""Questions unlike each other (`kinds`) below which answers prove nothing, unless the KV is near exact."""

_FLOOR = 0.05
"""Share of the KV's spread below which a deficit is rounding and codes, not signal."""

_WORST = 1e30

_SHARE = 2**22
"""Logits compared at a time: a vocabulary of 150,000 and a long question would not fit otherwise."""


@dataclass(frozen=True)
class Proof:
    """How far patched KV, and what the model says behind it, are from the true KV.

    ``kl`` is the largest divergence of one next-token distribution, in nats, over ``tokens`` tokens of the
    questions; ``flips`` is the number of tokens whose likeliest successor is another one, although the true
    one led by `DECIDED`. ``kv`` is the `kv_error`. ``asked`` are sketches of the questions.
    """

    kl: float
    flips: int
    tokens: int
    kv: float
    asked: tuple[str, ...]

    @property
    def questions(self) -> int:
        """Number of the questions."""
        return len(self.asked)

    @property
    def kinds(self) -> int:
        """Number of questions that are unlike each other."""
        return kinds(self.asked)

    @property
    def asks_too_few(self) -> bool:
        """True if fewer kinds of questions were asked than its error of KV needs: it proves nothing yet."""
        return not self.tokens or (not self.kv <= NEAR_EXACT and self.kinds < LEAST_KINDS)

    @property
    def undecided(self) -> bool:
        """True if more questions could still make it a proof."""
        return self.asks_too_few and self.flips == 0 and (not self.tokens or self.kv <= KV_BOUND)

    def holds_at(self, tolerance: float) -> bool:
        """True if enough was asked, nothing flipped, no token diverged by more, and the KV is near enough."""
        if self.asks_too_few or self.flips:
            return False
        return self.kl <= tolerance and self.kv <= KV_BOUND  # false for a NaN

    def covers(self, question: str) -> bool:
        """True if it tells of a question of this sketch: one like it was asked, or the KV is near exact."""
        return self.kv <= NEAR_EXACT or any(alike(question, other) for other in self.asked)

    def __str__(self) -> str:
        if not self.tokens:
            return f"it was asked nothing, KV off by {self.kv:.2g}"
        asked = f"{self.tokens} tokens of {self.questions} questions of {self.kinds} kinds"
        return f"at most {self.kl:.2g} nats over {asked}, {self.flips} flipped, KV off by {self.kv:.2g}"

    def to_info(self) -> dict[str, Any]:
        """The proof as written to a record's ``info``."""
        return {"proof": asdict(self)}

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Proof | None:
        """The proof in a record's ``info`` (any JSON to the format); None if it holds no valid one."""
        told = info.get("proof")
        if not isinstance(told, Mapping) or told.keys() != {"kl", "flips", "tokens", "kv", "asked"}:
            return None
        numbers, counts, asked = (told["kl"], told["kv"]), (told["flips"], told["tokens"]), told["asked"]
        sound = all(type(x) in (int, float) and 0.0 <= x < math.inf for x in numbers)
        sound &= all(type(n) is int and n >= 0 for n in counts)
        if not sound or not isinstance(asked, list | tuple) or not all(map(is_sketch, asked)):
            return None
        return cls(float(told["kl"]), told["flips"], told["tokens"], float(told["kv"]), tuple(asked))


def compare(
    true: Sequence[torch.Tensor], patched: Sequence[torch.Tensor], asked: Sequence[str], kv: float
) -> Proof:
    """The proof from logits ``[tokens, vocabulary]`` of each question, behind the true and the patched KV.

    ``asked`` are the questions' sketches, ``kv`` is the patched KV's `kv_error`.
    """
    kl, flips, tokens = 0.0, 0, 0
    for want, got in zip(true, patched, strict=True):
        share = max(1, _SHARE // want.shape[-1])
        for p, q in zip(want.split(share), got.split(share), strict=True):
            p, q = p.float().log_softmax(-1), q.float().log_softmax(-1)
            each = (p.exp() * (p - q)).sum(-1)
            # a NaN must not be lost in a maximum, nor be written to a header; rounding goes below zero
            kl = max(kl, float(each.max())) if bool(each.isfinite().all()) else _WORST
            best, said = p.max(-1), q.argmax(-1, keepdim=True)
            flips += int((best.values - p.gather(-1, said)[:, 0] > DECIDED).sum())
            tokens += p.shape[0]
    return Proof(kl, flips, tokens, kv if math.isfinite(kv) else _WORST, tuple(asked))


def kv_error(true: KV, served: KV, deltas: Deltas) -> float:
    """The largest error of one token of ``served``, in units of what its layer and channel absorbed.

    The unit is the root mean square of the deficit's tokens (``deltas``, in any frame: a rotation keeps
    norms), at least `_FLOOR` of the spread of the true KV. So 0.0 is the true KV, and the canonical without
    a patch has 1.0 or more. A NaN is the worst of errors.
    """
    largest = 0.0
    for want, got, delta in zip(true.parts, served.parts, deltas.parts, strict=True):
        for name, tensor in want.items():
            x, y = _rows(tensor), _rows(got[name])
            if not x.shape[1]:
                continue
            spread = _rms(x - x.mean(1, keepdim=True))
            unit = torch.maximum(_rms(delta[name].float()), _FLOOR * spread)
            error = (y - x).norm(dim=2).amax(1).double()
            if not bool(error.isfinite().all()):
                return _WORST
            wrong = torch.where(error > 0, _WORST, 0.0)
            largest = max(largest, float(torch.where(unit > 0, error / unit, wrong).max()))
    return largest


def _rows(x: torch.Tensor) -> torch.Tensor:
    return rearrange(x, "layers heads tokens dim -> layers tokens (heads dim)").float()


def _rms(rows: torch.Tensor) -> torch.Tensor:
    """Root mean square of the norms of rows ``[layers, tokens, features]``, by layer; float64."""
    return rows.square().sum(2).mean(1).sqrt().double()
