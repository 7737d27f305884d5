"""Work counted where it happens: hooks on the decoder and the vision towers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(eq=False)
class Work:
    """Model work done while a `Meter.measure` block was open."""

    forwards: int = 0
    tokens: int = 0
    vision_encodes: int = 0


class Meter:
    """Counts decoder forwards (and the tokens in them) and vision tower runs of one model."""

    def __init__(self, decoder: nn.Module, towers: list[nn.Module]) -> None:
        self._open: list[Work] = []
        decoder.register_forward_hook(self._decoded, with_kwargs=True)
        for tower in towers:
            tower.register_forward_hook(self._encoded)

    @contextmanager
    def measure(self) -> Iterator[Work]:
        """Collect the work done inside the block; blocks nest."""
        work = Work()
        self._open.append(work)
        try:
            yield work
        finally:
            self._open.remove(work)

    def _decoded(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        given = kwargs.get("inputs_embeds")
        if given is None:
            given = kwargs.get("input_ids", args[0] if args else None)
        tokens = 0 if given is None else int(given.shape[0] * given.shape[1])
        for work in self._open:
            work.forwards += 1
            work.tokens += tokens

    def _encoded(self, module: nn.Module, args: Any, output: Any) -> None:
        for work in self._open:
            work.vision_encodes += 1
