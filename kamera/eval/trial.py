"""One arm's answer to one question behind windows: what every benchmark keeps of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kamera.eval.first_token import FirstToken

UNANSWERED = "None"
"""Response to what does not fit (the published benchmarks' own convention)."""


@dataclass(frozen=True)
class Trial:
    """One arm's answer to one item, and its price.

    ``first_token`` is over the ids of the reference's (None without a reference). ``window_tokens``,
    ``recomputed_tokens``, ``kept_bytes`` and ``forwards`` are of the window alone (`Reply`), ``live_tokens``
    and ``live_forwards`` of parts that arrived with the question. ``kv_bytes`` is the KV of both,
    ``patch_bytes`` what is kept beside the window's canonicals. ``note`` is empty, "cut" (parts dropped from
    the left), "over-length" or "out of memory" (both answered "None"). ``error`` is the reason for a missing
    answer.
    """

    item: str
    arm: str
    answer: str = ""
    first_token: FirstToken | None = None
    window_tokens: int = 0
    recomputed_tokens: float = 0.0
    kept_bytes: int = 0
    forwards: int = 0
    ttft_seconds: float = 0.0
    error: str = ""
    note: str = ""
    question_tokens: int = 0
    live_tokens: int = 0
    live_forwards: int = 0
    patch_bytes: int = 0
    kv_bytes: int = 0
    answer_seconds: float = 0.0

    @property
    def computed_tokens(self) -> int:
        """Those of the prompt that were computed for this answer, without the question's."""
        return round(self.recomputed_tokens) + self.live_tokens

    def with_error(self, error: Exception) -> Trial:
        """This trial with its error; out of memory is an answer that does not fit."""
        if isinstance(error, torch.OutOfMemoryError):
            return replace(self, answer=UNANSWERED, note="out of memory")
        first = (str(error).strip().splitlines() or [""])[0]
        return replace(self, error=f"{type(error).__name__}: {first}")
