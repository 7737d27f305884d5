"""Windows of the laboratory whose pictures have as many tokens as asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kamera.testbed import Episode
from lab.composed.windows import Pool
from lab.paper.draw import TARGET
from lab.testbed.unled.windows import LARGE, MEDIUM, Size, episode

SIZES: dict[int, Size | None] = {64: None, 256: MEDIUM, 1444: LARGE}
"""By tokens of a picture; None for the world's own frames, of 64 (legends) and 144 (items)."""


@dataclass(eq=False)
class SizedPool(Pool):
    """An episode of frames of one size: legends that override each other, and items behind them.

    Of the world's own size it is that of its ``world``.
    """

    size: Size | None = None

    @cached_property
    def episode(self) -> Episode:
        """The frames, as in `Pool`."""
        if self.size is None:
            return Pool.episode.func(self)  # type: ignore[attr-defined, no-any-return]
        rng = np.random.default_rng([self.seed, self.index])
        return replace(episode(rng, "L" * TARGET + "I", self.size), index=self.index)
