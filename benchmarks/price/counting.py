"""Hooks that count what a model runs, answers that are dictated, and what a prefix cache would have run."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kamera.content import Rendered
from kamera.engines.hf import HfEngine
from kamera.engines.hf.hooks import OwnHook


@dataclass
class Ran:
    """Forwards of the decoder, and runs of the vision tower.

    ``spans`` are the tokens of each forward of all threads, in order, ``threads`` who ran it.
    """

    spans: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    encodes: int = 0

    @property
    def counts(self) -> tuple[int, int]:
        """Forwards, tokens."""
        return len(self.spans), sum(self.spans)

    def mine(self, start: int, stop: int | None = None) -> list[int]:
        """Tokens of each forward that the calling thread ran, from the ``start``-th of all on."""
        here = threading.get_ident()
        pairs = zip(self.spans[start:stop], self.threads[start:stop], strict=True)
        return [span for span, thread in pairs if thread == here]


@contextmanager
def watching(backbone: HfEngine) -> Iterator[Ran]:
    """Count the runs of the first decoder layer and of the vision tower."""
    ran = Ran()

    def decoded(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        ran.threads.append(threading.get_ident())
        ran.spans.append(int(hidden.shape[0] * hidden.shape[1]))

    def encoded(module: Any, args: Any) -> None:
        ran.encodes += 1

    modules = backbone.model.named_modules()
    towers = [m for name, m in modules if name.split(".")[-1] in ("visual", "vision_tower")]
    hooks = [backbone.decoder.layers[0].register_forward_pre_hook(OwnHook(decoded), with_kwargs=True)]
    hooks += [tower.register_forward_pre_hook(OwnHook(encoded)) for tower in towers]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


class Dictated:
    """A logits processor that lets the model say ``ids``, and notes what had run before its first token.

    Counted are the forwards of the thread that answers, from the ``start``-th of all on.
    """

    def __init__(self, ids: Sequence[int], ran: Ran) -> None:
        self._ids, self._ran, self._start, self._said = list(ids), ran, len(ran.spans), 0
        self.first: list[int] = []
        """Tokens of each forward before the first token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores that leave one token."""
        if not self._said:
            self.first = self._ran.mine(self._start)
        token, self._said = self._ids[self._said], self._said + 1
        return torch.full_like(scores, float("-inf")).index_fill(1, torch.tensor([token]), 0.0)


def named(prompt: Rendered, placeholder: int) -> list[Hashable]:
    """The prompt's tokens as a prefix cache tells them apart: a picture's by its pixels, too."""
    tokens: list[Hashable] = [*prompt.ids.tolist()]
    for segment in prompt.segments:
        if segment.media is not None:
            for at in range(segment.start, segment.stop):
                if tokens[at] == placeholder:
                    tokens[at] = (segment.media, at - segment.start)
    return tokens


def shared(cached: Sequence[Hashable], prompt: Sequence[Hashable]) -> int:
    """Tokens of the prompt that a prefix cache holds: the last one has to be run for its logits."""
    pairs = zip(cached, prompt[:-1], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(cached), len(prompt) - 1))
