"""The largest size of a patch, and the best patch of that size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from kamera.errors import quote
from kamera.ops.compress import compress
from kamera.ops.factoring import kept_energy
from kamera.ops.kv import KV, Blocks, kv_bytes
from kamera.ops.layout import Layout
from kamera.ops.lowrank import Deltas, Formed
from kamera.ops.patch import patch_of

SMALL = 128 * 1024
"""Bytes to which any patch may grow: the chunk's embeddings alone take more."""


class Sized(NamedTuple):
    """A patch, and the limits that applied when it was formed."""

    formed: Formed
    budget: PatchBudget


@dataclass(frozen=True)
class PatchBudget:
    """At most ``rank`` directions per layer and channel, and at most ``share`` of the chunk's KV bytes.

    ``share`` None means no limit on bytes. The share never cuts a patch below `SMALL` bytes. ``layers`` are
    the layers to correct (ascending; None: all). Raises ValueError for a rank below 1, a share outside
    (0, 1], and layers that are empty or not a tuple from `layers_of`.
    """

    rank: int
    share: float | None = None
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank {self.rank} must be at least 1")
        if self.share is not None and not 0.0 < self.share <= 1.0:
            raise ValueError(f"patch_bytes {self.share} must be a share of the KV bytes above 0.0, up to 1.0")
        if self.layers != layers_of(self.layers):
            raise ValueError(f"layers {self.layers} are not a tuple in ascending order")

    def form(self, deltas: Deltas, layout: Layout, canonical: KV) -> Sized:
        """The best patch within the budget for deficits from `deficit`.

        Plain factors in the canonical's dtype, if they fit; otherwise `compress` allots the bytes. Raises
        ValueError for layers that the layout lacks.
        """
        self.check(len(layout))
        if self.layers is None:
            return self._form(deltas, layout, canonical)
        some = _select_layers(deltas, set(self.layers))
        spent = tuple(s if i in self.layers else replace(s, channels=()) for i, s in enumerate(layout))
        (patch, _), budget = self._form(some, spent, canonical)
        patch = patch.regroup(deltas.groups)
        return Sized(Formed(patch, kept_energy(deltas, patch)), budget)  # layers left out count as lost

    def check(self, depth: int) -> None:
        """Raise ValueError for layers beyond a model of ``depth`` layers."""
        if self.layers is not None and self.layers[-1] >= depth:
            raise ValueError(
                f"layer {self.layers[-1]} of a model of {depth} layers: give layers from 0 to {depth - 1}"
            )

    def is_met_by(self, other: PatchBudget, tokens: int) -> bool:
        """True if a patch of a ``tokens``-token chunk formed under ``other`` satisfies this budget."""
        if min(other.rank, tokens) < min(self.rank, tokens):
            return False
        if other.layers is not None and (self.layers is None or not set(self.layers) <= set(other.layers)):
            return False
        return other.share is None or (self.share is not None and other.share >= self.share)

    def union(self, other: PatchBudget) -> PatchBudget:
        """The smallest budget that satisfies both."""
        share = None if self.share is None or other.share is None else max(self.share, other.share)
        both = None
        if self.layers is not None and other.layers is not None:
            both = layers_of((*self.layers, *other.layers))
        return PatchBudget(max(self.rank, other.rank), share, both)

    def double(self, kv: KV) -> PatchBudget:
        """Twice the rank, and twice the bytes that a patch of this canonical may have; the same layers."""
        share = None if self.share is None else min(1.0, 2 * max(self.share, SMALL / kv_bytes(kv)))
        return PatchBudget(2 * self.rank, share, self.layers)

    def to_info(self) -> dict[str, Any]:
        """The budget as written to a record's ``info``."""
        layers = {} if self.layers is None else {"asked_layers": list(self.layers)}
        return {"asked_rank": self.rank, "asked_share": self.share, **layers}

    @classmethod
    def from_info(cls, info: Mapping[str, Any], rank: int) -> PatchBudget:
        """The budget of a stored patch; ``rank`` is the patch's own, for records without a budget."""
        layers = layers_of(info.get("asked_layers"))
        return cls(max(1, int(info.get("asked_rank", rank))), info.get("asked_share"), layers)

    def _form(self, deltas: Deltas, layout: Layout, canonical: KV) -> Sized:
        dtype = next(t.dtype for block in canonical.parts for t in block.values())
        if self.share is None:
            return Sized(patch_of(deltas, self.rank, dtype), self)
        plain = sum(
            delta.shape[0] * min(self.rank, *delta.shape[1:]) * sum(delta.shape[1:]) * dtype.itemsize
            for block in deltas.parts
            for delta in block.values()
        )
        allowed = max(int(self.share * kv_bytes(canonical)), min(SMALL, plain))
        if plain <= allowed:
            return Sized(patch_of(deltas, self.rank, dtype), PatchBudget(self.rank, None, self.layers))
        return Sized(compress(deltas, layout, allowed, rank=self.rank), self)


def _select_layers(deltas: Deltas, wanted: set[int]) -> Deltas:
    """The deficits of some layers; the others have no channels."""
    parts: list[Mapping[str, torch.Tensor]] = []
    groups: list[tuple[int, ...]] = []
    for block, layers in zip(deltas.parts, deltas.groups, strict=True):
        for inside in (True, False):
            rows = [row for row, layer in enumerate(layers) if (layer in wanted) == inside]
            if rows:
                parts.append({name: x[rows] for name, x in block.items()} if inside else {})
                groups.append(tuple(layers[row] for row in rows))
    return Blocks(parts, tuple(groups))


def layers_of(given: Sequence[int] | str | None) -> tuple[int, ...] | None:
    """Layer numbers in ascending order, from a list or from ``"a:b"`` (a to b - 1); None for all.

    Raises ValueError for other values, negative numbers and an empty list.
    """
    if given is None:
        return None
    numbers: Sequence[int] = ()
    if isinstance(given, str):
        span = re.fullmatch(r"(\d{1,6}):(\d{1,6})", given)
        numbers = range(int(span.group(1)), int(span.group(2))) if span else numbers
    else:
        numbers = given
    if not numbers or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(
            f'layers {quote(given)}: give numbers from 0 on, as a list or as "a:b" with a below b'
        )
    return tuple(sorted(set(numbers)))
