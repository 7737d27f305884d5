"""What an engine says of its model and of its work: names, limits, answers, counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kamera.errors import NotRelocatable
from kamera.ops import KV


@dataclass(frozen=True)
class PositionLimits:
    """Limits of a model's positions.

    From ``below`` on the model rotates keys differently, for ``reason``; ``trained`` is the number of
    positions it was trained on. None: no limit of that kind.
    """

    trained: int | None = None
    below: int | None = None
    reason: str = ""

    @property
    def last(self) -> int:
        """The first position that cannot be used."""
        return min((end for end in (self.trained, self.below) if end is not None), default=2**31)

    def check_tokens(self, positions: torch.Tensor) -> None:
        """As `check`, for each of ``positions``."""
        if positions.numel():
            self.check(int(positions.max()))

    def check(self, highest: int) -> None:
        """Raise NotRelocatable for a position at which the model rotates keys differently."""
        if self.below is not None and highest >= self.below:
            raise NotRelocatable(
                f"position {highest} reaches this model's limit of {self.below}: "
                f"{self.reason}; keep the window below it (max_tokens, slide)"
            )


class ModelFacts(NamedTuple):
    """What a model is, apart from its layout.

    ``kind`` is its class, ``checkpoint`` its name ("" for none), ``family`` that of its attention (MHA, GQA,
    MQA, MLA or MLA_EXPANDED, or several joined by "+"), ``no_reuse`` why no KV of it can be used
    again ("" if it can). It ``joins`` if adjacent spans of any kind share a forward. Bytes are those of a
    token's KV in all layers; its phased channels are rotated when the token moves.
    """

    kind: str
    checkpoint: str
    family: str
    dtype: str
    bytes_per_token: int
    phased_bytes_per_token: int
    joins: bool = True
    no_reuse: str = ""


class Continuation(NamedTuple):
    """New tokens ``[sequences, new]``, and KV of what ran for them.

    ``kvs`` are those of the spans that came with the question, which ran in ``forwards`` forwards (the
    question's own counts as one of them). ``tail`` is that of the question and of the answer's tokens but
    those that the model was not asked to go on from; None of several sequences, or if it is not finite.
    ``first`` is the time (`time.perf_counter`) of the first token's logits. The caller owns the KVs.
    """

    tokens: torch.Tensor
    kvs: tuple[KV, ...]
    tail: KV | None
    forwards: int
    first: float


@dataclass(eq=False)
class Work:
    """Model work in an `Engine.measure` block: decoder forwards, tokens in them, runs of the vision tower."""

    forwards: int = 0
    tokens: int = 0
    vision_encodes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, *, forwards: int = 0, tokens: int = 0, vision_encodes: int = 0) -> None:
        """Count more; safe from several threads."""
        with self._lock:
            self.forwards += forwards
            self.tokens += tokens
            self.vision_encodes += vision_encodes
