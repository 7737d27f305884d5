"""The interface of a way to reuse KV: three functions, for Kamera's own arms and for everybody else's.

>>> class Nothing:                                   # reuses nothing
...     rehearsed = False
...     def encode(self, unit): ...                  # a unit is seen for the first time
...     def place(self, order): ...                  # these units are the window now, in this order
...     def ask(self, query): ...                    # answer behind the window
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kamera.content import Chunk

Parts = Sequence[Mapping[str, Any]]
"""Chat content: items of type text, image or video."""


@dataclass(frozen=True)
class Unit:
    """What moves as a whole: an image, a clip or a text, under a name that is unique in its item.

    A ``live`` one belongs to the question, though it stands in the context: every arm computes it there.
    """

    name: str
    content: Parts | Chunk
    live: bool = False

    def check_reusable(self) -> None:
        """Raise ValueError for a live unit: for arms that cannot compute one inside the context."""
        if self.live:
            raise ValueError("a live part stands inside the context: this arm takes it behind only")


@dataclass(frozen=True)
class ArmQuestion:
    """A question behind a window: units that arrive with it (``live``, never reused), then its text."""

    text: str
    live: tuple[Unit, ...] = ()
    max_new_tokens: int = 16


@dataclass(frozen=True, eq=False)
class Reply:
    """A greedy answer, and its price since the window was placed.

    ``logits`` ``[vocabulary]`` are those of its first token. ``first_token_seconds`` counts from the call of
    `ask`. ``recomputed_tokens`` are the window's tokens times the share of layers run for them, from the
    last `place` on (the question's own do not count). ``kept_bytes`` are held so that the window's units can
    be served, beyond pixels and encodings; ``forwards`` are those over the window's units.
    """

    text: str
    logits: torch.Tensor
    first_token_seconds: float
    recomputed_tokens: float
    kept_bytes: int
    window_tokens: int
    forwards: int = 0


class Adapter(Protocol):
    """A way to serve windows of units that were seen before. A new one serves each trace.

    ``rehearsed`` is True for a method that prepares a window in advance, as `kamera compile` does: the last
    window of a trace is then placed once before the trace begins, and results say so.
    """

    rehearsed: bool

    def encode(self, unit: Unit) -> None:
        """A unit is seen for the first time: store what will be reused. Not on the clock."""
        ...

    def place(self, order: Sequence[str]) -> None:
        """Make the window hold these encoded units, in this order. On the clock for the asked window."""
        ...

    def ask(self, query: ArmQuestion) -> Reply:
        """Answer behind the window, which stays as it is."""
        ...
