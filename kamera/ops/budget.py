"""How large a patch may be, and the best patch of that size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kamera.ops.compress import compress
from kamera.ops.kv import KV, kv_bytes
from kamera.ops.layout import Layout
from kamera.ops.lowrank import Deltas, Formed
from kamera.ops.patch import patch_of

SMALL = 128 * 1024
"""Bytes below which a patch is not worth making smaller: its chunk's embeddings alone are more."""


class Sized(NamedTuple):
    """A patch, and the budget it fills: what it was formed under, as far as that cut it."""

    formed: Formed
    budget: PatchBudget


@dataclass(frozen=True)
class PatchBudget:
    """At most ``rank`` directions per layer and channel, and at most ``share`` of the chunk's KV bytes.

    ``share`` None leaves the bytes to the rank. No patch is cut below `SMALL` bytes for the share's sake.
    Raises ValueError for a rank below 1 and a share that is not above 0 and at most 1.
    """

    rank: int
    share: float | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank {self.rank} must be at least 1")
        if self.share is not None and not 0.0 < self.share <= 1.0:
            raise ValueError(f"patch_bytes {self.share} must be a share of the KV bytes above 0.0, up to 1.0")

    def form(self, deltas: Deltas, layout: Layout, canonical: KV) -> Sized:
        """The best patch within the budget for deficits as `deficit` gives them.

        The plain one, in the canonical's dtype, where that fits; otherwise `compress` spends the bytes.
        """
        dtype = next(t.dtype for layer in canonical for t in layer.values())
        if self.share is None:
            return Sized(patch_of(deltas, self.rank, dtype), self)
        plain = sum(
            min(self.rank, *delta.shape) * sum(delta.shape) * dtype.itemsize
            for layer in deltas
            for delta in layer.values()
        )
        allowed = max(int(self.share * kv_bytes(canonical)), min(SMALL, plain))
        if plain <= allowed:
            return Sized(patch_of(deltas, self.rank, dtype), PatchBudget(self.rank))
        return Sized(compress(deltas, layout, allowed, rank=self.rank), self)

    def met_by(self, other: PatchBudget, tokens: int) -> bool:
        """Whether a patch of a ``tokens``-token chunk formed under ``other`` is as good as this asks for."""
        if min(other.rank, tokens) < min(self.rank, tokens):
            return False
        return other.share is None or (self.share is not None and other.share >= self.share)

    def to_info(self) -> dict[str, Any]:
        """As it stands in a record's ``info``."""
        return {"asked_rank": self.rank, "asked_share": self.share}

    @classmethod
    def from_info(cls, info: Mapping[str, Any], rank: int) -> PatchBudget:
        """The budget of a stored patch; ``rank`` is its own, for records that do not say."""
        return cls(max(1, int(info.get("asked_rank", rank))), info.get("asked_share"))
