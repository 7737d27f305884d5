"""The positions a chunk adds to a window, at any place: asked of the model once, then summed.

`get_rope_index` walks the whole sequence in Python: with 64 pictures that is tens of milliseconds for every
edit of a window. If a chunk's positions do not depend on its neighbours, the same positions are sums of the
chunks' extents. This is tested for each chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from kamera import forks
from kamera.content import TOKEN_TYPES, Encoded
from kamera.errors import IncompatibleChunk

_HELD = 4096  # chunks: 24 bytes a token each
_TEXT = 5  # tokens of text in front of a chunk under test

Positions = Callable[[Sequence[torch.Tensor], Sequence[Mapping[str, torch.Tensor]]], torch.Tensor]
"""The model's own positions of spans: (token ids, inputs) -> int64 ``[axes, tokens]``."""


class Extent(NamedTuple):
    """A chunk's positions relative to its start ``[axes, tokens]``, and the start of the next span.

    ``first`` and ``last`` are the token ids it begins and ends with.
    """

    positions: torch.Tensor
    advance: torch.Tensor
    first: int
    last: int


class Extents:
    """Extents of chunks, by id, of one model whose ``pictures`` are tokens of these ids. Thread-safe.

    ``whole``: the model's kind, if a picture there sees its own later tokens, else "".
    """

    def __init__(self, positions: Positions, pictures: Iterable[int], whole: str = "") -> None:
        self._positions, self._pictures, self._whole = positions, frozenset(pictures), whole
        self._extents: OrderedDict[str, Extent | None] = OrderedDict()
        self._lock = forks.Lock()

    def of(self, chunk_id: str, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Extent | None:
        """The extent of a chunk; None if positions with it are no such sum."""
        with self._lock:
            if chunk_id in self._extents:
                self._extents.move_to_end(chunk_id)
                return self._extents[chunk_id]
        extent = self._try(ids, inputs)  # two threads may both run the test, with equal results
        with self._lock:
            self._extents[chunk_id] = extent
            if len(self._extents) > _HELD:
                self._extents.popitem(last=False)
        return extent

    def of_all(self, chunks: Sequence[Encoded]) -> list[Extent] | None:
        """Extents of consecutive chunks.

        None if one has none, or if two pictures touch: use `Engine.positions` of the whole sequence then.
        Raises IncompatibleChunk if the model takes two that touch for one, and their KV would differ.
        """
        if self._whole:
            _refuse_touching(self._whole, chunks)
        extents: list[Extent] = []
        for chunk in chunks:
            extent = self.of(chunk.chunk_id, chunk.input_ids, chunk.position_inputs)
            if extent is None or (extents and {extent.first, extents[-1].last} <= self._pictures):
                return None
            extents.append(extent)
        return extents

    def _try(self, ids: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Extent | None:
        """The extent, None unless the chunk adds the same positions between texts and right behind itself."""
        count = ids.shape[0]
        text, one = ids.new_zeros(_TEXT), ids.new_zeros(1)
        single = self._positions([text, ids, one], [{}, inputs, {}])
        extent = Extent(single[:, _TEXT:-1] - _TEXT, single[:, -1:] - _TEXT, int(ids[0]), int(ids[-1]))
        try:
            double = self._positions([text, ids, ids, one], [{}, inputs, inputs, {}])
        except IncompatibleChunk:
            return None  # the model takes pictures that touch for one
        second = _TEXT + extent.advance
        sums = torch.cat(
            [single[:, : _TEXT + count], extent.positions + second, second + extent.advance], dim=1
        )
        return extent if torch.equal(double, sums) else None


def chunk_positions(before: int, extents: Sequence[Extent]) -> list[torch.Tensor]:
    """Positions of consecutive chunks behind ``before`` tokens of text, each ``[axes, tokens]``."""
    if not extents:
        return []
    advances = torch.cat([e.advance for e in extents], dim=1)
    starts = (before + advances.cumsum(1) - advances).split(1, dim=1)
    return [extent.positions + start for extent, start in zip(extents, starts, strict=True)]


def text_start(before: int, extents: Sequence[Extent]) -> torch.Tensor:
    """Start of a text behind the chunks, ``[axes, 1]`` (``[1, 1]`` without chunks)."""
    if not extents:
        return torch.tensor([[before]])
    return before + torch.cat([e.advance for e in extents], dim=1).sum(1, keepdim=True)


def _refuse_touching(kind: str, chunks: Sequence[Encoded]) -> None:
    """Raise IncompatibleChunk if pictures of neighbours are one to this ``kind``.

    A model whose pictures see their own later tokens takes a run of picture tokens for one picture. Of two
    that touch the first one's KV depends on the tokens behind it: no chunk with it could be stored or moved.
    """
    for first, second in pairwise(chunks):
        if _is_picture(first, -1) and _is_picture(second, 0):
            raise IncompatibleChunk(
                f"chunk {first.chunk_id[:12]} ends and chunk {second.chunk_id[:12]} begins with a picture, "
                f"which {kind} takes for one: begin or end chunks with text, or put text between them"
            )


def _is_picture(encoded: Encoded, token: int) -> bool:
    if not encoded.tensors:
        return False  # no picture was encoded: the model masks it as text
    kinds = (encoded.position_inputs.get(name) for name in TOKEN_TYPES)
    return any(kind is not None and bool(kind[token]) for kind in kinds)
