"""How likely the tokens of an answer were, and which others might have come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kamera.content import MOST_LIKELY
from kamera.errors import quote


class Logprob(NamedTuple):
    """A token of an answer, and the ``likeliest`` ones at its place, the likeliest first.

    Logarithms (natural) are of the model's own probabilities: of its logits, after penalties that its
    settings ask for, before temperature, ``top_k`` and ``top_p``.
    """

    token_id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


class Logprobs:
    """A logits processor that changes nothing, and notes how likely each token was, of one sequence.

    ``most`` likeliest tokens are told with each: 0 none.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._noted: list[Logprob] = []
        self._next: torch.Tensor | None = None  # of the token that comes

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """``scores`` ``[1, vocabulary]`` as they are."""
        self._note(int(input_ids[0, -1]))
        self._next = scores[0].float().log_softmax(-1)
        return scores

    def of(self, ids: Sequence[int]) -> tuple[Logprob, ...]:
        """Those of an answer, which has ended with ``ids``: one for each."""
        if ids:
            self._note(ids[-1])
        return tuple(self._noted)

    def _note(self, token: int) -> None:
        if self._next is not None:
            values, places = self._next.topk(self._most)
            likeliest = tuple(zip(places.tolist(), values.tolist(), strict=True))
            self._noted.append(Logprob(token, float(self._next[token]), likeliest))
            self._next = None


def noted_of(most: int | None, options: Mapping[str, Any]) -> Logprobs | None:
    """What notes the logprobs of an answer with ``options``; nothing for None.

    Raises ValueError for another number than 0 to 20, and for options by which an answer is not made token by
    token.
    """
    if most is None:
        return None
    if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= MOST_LIKELY:
        raise ValueError(f"logprobs={quote(most)}: give the number of likeliest tokens, 0 to {MOST_LIKELY}")
    if int(options.get("num_beams") or 1) > 1 or options.get("assistant_model") is not None:
        raise ValueError("logprobs are of an answer made token by token: use no beams and no assistant")
    return Logprobs(most)
