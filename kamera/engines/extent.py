"""What a chunk adds to positions, wherever it stands: asked of the model once, then added up.

`get_rope_index` walks the whole sequence in Python: with 64 pictures that is tens of milliseconds for every
edit of a window. Where the model lets chunks stand one after another without looking at each other, the
same positions are sums of what each chunk adds. Whether it does is tried out for each chunk.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import torch

_HELD = 4096  # chunks: 24 bytes a token each
_TEXT = 5  # tokens of text in front of a chunk that is tried out

Positions = Callable[[Sequence[torch.Tensor], Sequence[Mapping[str, torch.Tensor]]], torch.Tensor]
"""The model's own positions of spans: (token ids, inputs) -> int64 ``[axes, tokens]``."""


class Extent(NamedTuple):
    """A chunk's positions from its own beginning ``[axes, tokens]``, and where what follows begins.

    ``first`` and ``last`` are the token ids it begins and ends with.
    """

    positions: torch.Tensor
    advance: torch.Tensor
    first: int
    last: int


class Extents:
    """Extents of chunks, by id, of one model. Safe to use from several threads."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self._known: OrderedDict[str, Extent | None] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, chunk_id: str, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Extent | None:
        """The extent of a chunk; None for one whose positions are not such a sum."""
        with self._lock:
            if chunk_id in self._known:
                self._known.move_to_end(chunk_id)
                return self._known[chunk_id]
        extent = self._tried(ids, inputs)  # two threads may both try it out, and find the same
        with self._lock:
            self._known[chunk_id] = extent
            if len(self._known) > _HELD:
                self._known.popitem(last=False)
        return extent

    def of_all(
        self, spans: Sequence[tuple[str, torch.Tensor, Mapping[str, torch.Tensor]]], pictures: Container[int]
    ) -> list[Extent] | None:
        """Extents of ``(chunk id, ids, inputs)`` one after another; None where one has none, or two pictures
        (tokens of ``pictures``) touch."""
        found: list[Extent] = []
        for chunk_id, ids, inputs in spans:
            extent = self.of(chunk_id, ids, inputs)
            if extent is None or (found and extent.first in pictures and found[-1].last in pictures):
                return None
            found.append(extent)
        return found

    def _tried(self, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Extent | None:
        """Between texts, and right behind itself, the chunk must add the same."""
        count = ids.shape[0]
        text, one = ids.new_zeros(_TEXT), ids.new_zeros(1)
        alone = self._positions([text, ids, one], [{}, inputs, {}])
        extent = Extent(alone[:, _TEXT:-1] - _TEXT, alone[:, -1:] - _TEXT, int(ids[0]), int(ids[-1]))
        try:
            twice = self._positions([text, ids, ids, one], [{}, inputs, inputs, {}])
        except (StopIteration, IndexError, RuntimeError, TypeError, ValueError):
            return None  # pictures that touch each other are one to the model
        second = _TEXT + extent.advance
        wanted = torch.cat(
            [alone[:, : _TEXT + count], extent.positions + second, second + extent.advance], dim=1
        )
        return extent if torch.equal(twice, wanted) else None


def standing(before: int, extents: Sequence[Extent]) -> list[torch.Tensor]:
    """Positions of chunks one after another behind ``before`` tokens of text, each ``[axes, tokens]``."""
    if not extents:
        return []
    advances = torch.cat([e.advance for e in extents], dim=1)
    starts = (before + advances.cumsum(1) - advances).split(1, dim=1)
    return [extent.positions + start for extent, start in zip(extents, starts, strict=True)]


def behind(before: int, extents: Sequence[Extent]) -> torch.Tensor:
    """Where a text behind them begins, ``[axes, 1]`` (``[1, 1]`` without chunks)."""
    if not extents:
        return torch.tensor([[before]])
    return before + torch.cat([e.advance for e in extents], dim=1).sum(1, keepdim=True)
