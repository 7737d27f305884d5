"""Sampling with a seed of its own: no other thread's draws come between."""

from __future__ import annotations

from typing import Any

import torch

from kamera.errors import quote

_LARGEST = 2**63


class Seeded:
    """A logits processor that draws each token itself: greedy decoding behind it takes the one it left."""

    def __init__(self, seed: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> None:
        if not isinstance(seed, int) or isinstance(seed, bool) or not -_LARGEST <= seed < _LARGEST:
            raise ValueError(f"seed={quote(seed)}: give a whole number of 64 bits")
        self._draws = torch.Generator().manual_seed(seed)
        self._temperature, self._top_k, self._top_p = temperature, top_k, top_p

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[rows, vocabulary]`` of which one in each row is left."""
        kept = scores.float().cpu() / self._temperature
        if 0 < self._top_k < kept.shape[-1]:
            kept = kept.masked_fill(kept < kept.topk(self._top_k).values[:, -1:], -torch.inf)
        if self._top_p < 1.0:
            ordered, places = kept.softmax(-1).sort(descending=True)
            late = ordered.cumsum(-1) - ordered >= self._top_p
            late[:, 0] = False
            kept = kept.masked_fill(torch.zeros_like(late).scatter(-1, places, late), -torch.inf)
        drawn = torch.multinomial(kept.softmax(-1), 1, generator=self._draws).to(scores.device)
        return torch.full_like(scores, -torch.inf).scatter(-1, drawn, 0.0)


def with_seed(options: dict[str, Any], seed: int | None) -> dict[str, Any]:
    """Options of an answer whose tokens are drawn with ``seed``; as they are without one, or if greedy.

    Temperature, top_k and top_p are those of ``options``, else 1.0, none and none. Raises ValueError for a
    seed that is no whole number, and for a temperature of 0.
    """
    if seed is None:
        return options
    names = ("temperature", "top_k", "top_p")
    drawn = Seeded(seed, **{name: options[name] for name in names if options.get(name) is not None})
    if not options.get("do_sample", True):
        return options
    if options.get("temperature") == 0:
        raise ValueError("temperature=0 with a seed: use do_sample=False for the likeliest tokens")
    rest = {name: value for name, value in options.items() if name not in (*names, "do_sample")}
    return {
        **rest,
        "do_sample": False,
        "logits_processor": [*(rest.get("logits_processor") or ()), drawn],
    }
