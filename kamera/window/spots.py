"""Positions of chunks as whole numbers: conversion between the model's position tensors and spots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import add
from typing import NamedTuple

import torch

from kamera.engines import Engine, Extent
from kamera.ops import tensor_digest
from kamera.patches import Anchor, Facts, compact_positions
from kamera.window.seats import Offset, Spot

_MOST = 4096  # chunks, at 24 bytes per token


class _Pattern(NamedTuple):
    """Positions of a chunk's tokens from its lowest one ``[axes, tokens]``, and their maximum per axis."""

    positions: torch.Tensor
    high: Offset


class _PlaceInRow(NamedTuple):
    """A chunk's spot in a row behind the anchor, and where the next one begins, per axis."""

    chunk_id: str
    spot: Spot
    end: Offset


class Spots:
    """Spots behind one anchor. Safe to use from several threads: its only state is a cache."""

    def __init__(self, backbone: Engine, anchor: Anchor) -> None:
        self.backbone = backbone
        self.anchor = anchor
        self._patterns: OrderedDict[tuple[str, str], _Pattern] = OrderedDict()
        self._sums: OrderedDict[str, tuple[Offset, Offset]] = OrderedDict()
        self._row: tuple[_PlaceInRow, ...] = ()

    def spot(self, facts: Facts, positions: torch.Tensor) -> Spot:
        """The spot of a chunk at ``positions`` ``[axes, tokens]``."""
        low = positions.amin(1)
        pattern = positions - low[:, None]
        alone = self._pattern(facts, "")
        shape = "" if torch.equal(pattern, alone.positions) else tensor_digest(pattern)[:16]
        if shape:
            _remember(self._patterns, (facts.chunk_id, shape), _pattern_of(pattern))
        return _spot(low.tolist(), self._pattern(facts, shape), shape)

    def positions(self, facts: Facts, spot: Spot) -> torch.Tensor:
        """The positions of a chunk at a spot, ``[axes, tokens]``."""
        return self._pattern(facts, spot.shape).positions + torch.tensor(spot.low)[:, None]

    def compact(self, chunks: Sequence[Facts]) -> list[Spot]:
        """Spots of chunks one after another behind the anchor; those that stood so before are known."""
        last = self._row
        pairs = enumerate(zip(last, chunks, strict=False))
        same = next((i for i, (old, c) in pairs if old.chunk_id != c.chunk_id), min(len(last), len(chunks)))
        near = chunks[max(0, same - 1) :]  # neighbours may not touch
        extents = self.backbone.extents.of_all([(c.chunk_id, c.encoded) for c in near])
        if extents is None:
            positions = compact_positions(self.backbone, self.anchor.input_ids, chunks)
            return [self.spot(facts, p) for facts, p in zip(chunks, positions, strict=True)]
        row = list(last[:same])
        at = row[-1].end if row else (self.anchor.length,) * self.backbone.axes
        for facts, extent in zip(chunks[same:], extents[len(extents) - len(chunks) + same :], strict=True):
            low, advance = self._sum(facts.chunk_id, extent)
            spot = _spot(tuple(map(add, at, low)), self._pattern(facts, ""), "")
            at = tuple(map(add, at, advance))
            row.append(_PlaceInRow(facts.chunk_id, spot, at))
        if len(row) > 1:  # a chunk alone is asked for between rows
            self._row = tuple(row)
        return [place.spot for place in row]

    # -- inside --------------------------------------------------------------------------------

    def _pattern(self, facts: Facts, shape: str) -> _Pattern:
        key = (facts.chunk_id, shape)
        pattern = self._patterns.get(key)
        if pattern is None:
            assert not shape, "a shape is remembered when a spot of it is made"
            (alone,) = compact_positions(self.backbone, self.anchor.input_ids, [facts])
            pattern = _remember(self._patterns, key, _pattern_of(alone - alone.amin(1)[:, None]))
        return pattern

    def _sum(self, chunk_id: str, extent: Extent) -> tuple[Offset, Offset]:
        """Where a chunk's lowest positions are from the start of its span, and where the next span begins."""
        low_and_advance = self._sums.get(chunk_id)
        if low_and_advance is None:
            low, axes = extent.positions.amin(1), self.backbone.axes
            _remember(self._patterns, (chunk_id, ""), _pattern_of(extent.positions - low[:, None]))
            low_and_advance = tuple(low.tolist()), tuple(extent.advance.expand(axes, 1)[:, 0].tolist())
            _remember(self._sums, chunk_id, low_and_advance)
        return low_and_advance


def _pattern_of(pattern: torch.Tensor) -> _Pattern:
    return _Pattern(pattern, tuple(pattern.amax(1).tolist()))


def _spot(low: Sequence[int], pattern: _Pattern, shape: str) -> Spot:
    return Spot(tuple(low), tuple(map(add, low, pattern.high)), shape)


def _remember(cache: OrderedDict, key: object, value: object):  # type: ignore[no-untyped-def,type-arg]
    cache[key] = value
    while len(cache) > _MOST:
        cache.popitem(last=False)
    return value
