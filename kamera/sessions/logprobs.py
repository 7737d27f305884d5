"""How likely the tokens of an answer were, and which others might have come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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


def check_logprobs(most: int | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError for a number of likeliest tokens that is none from 0 to 20.

    Raises it also for ``options`` by which an answer is not made token by token.
    """
    if most is None:
        return
    if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= MOST_LIKELY:
        raise ValueError(f"logprobs={quote(most)}: give the number of likeliest tokens, 0 to {MOST_LIKELY}")
    if int(options.get("num_beams") or 1) > 1 or options.get("assistant_model") is not None:
        raise ValueError("logprobs are of an answer made token by token: use no beams and no assistant")
