"""Low-rank factors of a deficit, in floats or in codes, and patches of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from kamera.ops.quantize import Bits, Codes, quantize

Factor = torch.Tensor | Codes
"""One factor: floats ``[rows, m]``, or codes of such a matrix."""

Deltas = Sequence[Mapping[str, torch.Tensor]]
"""A deficit: per layer, channel -> ``[tokens, features]``."""

_NOISE = 1e-10  # directions weaker than this share of the strongest one are rounding, not signal


@dataclass(frozen=True, eq=False)
class LowRank:
    """Factors of one channel's deficit: Δ ≈ ``left @ right.T``.

    ``left`` is ``[tokens, m]``, ``right`` ``[features, m]`` (heads flattened), each in floats or as
    `Codes`. Columns are ordered by energy, so a prefix of them is the best approximation of its rank (of
    the weighted deficit, if it was factored under a `Metric`).
    """

    left: Factor
    right: Factor

    def __post_init__(self) -> None:
        shapes = tuple(self.left.shape), tuple(self.right.shape)
        if len(shapes[0]) != 2 or len(shapes[1]) != 2:
            raise ValueError(f"factors must be matrices, got {shapes[0]}, {shapes[1]}")
        if shapes[0][1] != shapes[1][1]:
            raise ValueError(f"left has rank {shapes[0][1]} and right {shapes[1][1]}: must be equal")

    @property
    def rank(self) -> int:
        """Number of directions."""
        return self.left.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of both factors, scales of codes included."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def dense(self) -> torch.Tensor:
        """``[tokens, features]`` in float32 (float64 for float64 factors)."""
        left, right = floats(self.left), floats(self.right)
        work = torch.promote_types(left.dtype, torch.float32)
        return left.to(work) @ right.to(work).T

    def truncate(self, rank: int) -> LowRank:
        """The ``rank`` strongest directions (all of them if there are fewer)."""
        if rank < 0:
            raise ValueError(f"rank {rank} is negative")
        return LowRank(_prefix(self.left, rank), _prefix(self.right, rank))

    def rerank(self, rank: int | None = None) -> LowRank:
        """Re-order arbitrary factors by energy, and keep ``rank``: the SVD of ``left @ right.T``.

        Costs a QR of each factor and an SVD of ``[m, m]``; Δ itself is never formed. Codes become
        float32.
        """
        work = torch.float64
        left, right = floats(self.left), floats(self.right)
        q_left, r_left = torch.linalg.qr(left.to(work))
        q_right, r_right = torch.linalg.qr(right.to(work))
        u, s, vh = torch.linalg.svd(r_left @ r_right.T)
        keep = _significant(s, rank)
        root = s[:keep].sqrt()
        return LowRank(
            (q_left @ u[:, :keep] * root).to(left.dtype),
            (q_right @ vh[:keep].T * root).to(right.dtype),
        )

    def quantize(self, bits: Bits = 8) -> LowRank:
        """Both factors as codes of ``bits`` bits, one scale per column."""
        return LowRank(quantize(floats(self.left), bits).codes, quantize(floats(self.right), bits).codes)

    def cast(self, dtype: torch.dtype) -> LowRank:
        """Both factors as floats of ``dtype``."""
        return LowRank(floats(self.left).to(dtype), floats(self.right).to(dtype))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensors to store: ``left`` and ``right``; for codes ``left_codes``, ``left_scales`` and so on."""
        held: dict[str, torch.Tensor] = {}
        for side, factor in (("left", self.left), ("right", self.right)):
            if isinstance(factor, Codes):
                held |= {f"{side}_codes": factor.codes, f"{side}_scales": factor.scales}
            else:
                held[side] = factor
        return held

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> LowRank:
        """The factors from the `tensors` of another; `KeyError` names a missing one."""

        def side(name: str) -> Factor:
            if f"{name}_codes" in tensors:
                return Codes(tensors[f"{name}_codes"], tensors[f"{name}_scales"])
            return tensors[name]

        return cls(side("left"), side("right"))


@dataclass(frozen=True, eq=False)
class Patch:
    """Low-rank factors for every layer and channel of one chunk behind given antecedents.

    A channel that is not named is not corrected (layer 0 never needs it: no attention precedes it).
    """

    layers: tuple[Mapping[str, LowRank], ...]

    @cached_property
    def rank(self) -> int:
        """The largest rank of any channel."""
        return max((f.rank for layer in self.layers for f in layer.values()), default=0)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the chunk it corrects, or None if it corrects nothing."""
        for layer in self.layers:
            for factors in layer.values():
                return factors.left.shape[0]
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(f.nbytes for layer in self.layers for f in layer.values())

    @cached_property
    def sizes(self) -> tuple[FactorSize, ...]:
        """The sizes of its factors, those of one rank and form together: what `patch_bytes` takes."""
        rows: dict[tuple[int, int], list[int]] = {}
        for factors in (f for layer in self.layers for f in layer.values()):
            for side in (factors.left, factors.right):
                bits = side.bits if isinstance(side, Codes) else 8 * side.element_size()
                rows.setdefault((factors.rank, bits), []).append(side.shape[0])
        return tuple(FactorSize(*form, sum(n), len(n)) for form, n in sorted(rows.items()))

    def truncate(self, rank: int) -> Patch:
        """Keep the ``rank`` strongest directions of every channel; rank 0 corrects nothing."""
        return self._map(lambda f: f.truncate(rank))

    def rerank(self, rank: int | None = None) -> Patch:
        """`LowRank.rerank` on every channel."""
        return self._map(lambda f: f.rerank(rank))

    def quantize(self, bits: Bits = 8) -> Patch:
        """`LowRank.quantize` on every channel."""
        return self._map(lambda f: f.quantize(bits))

    def _map(self, function: Callable[[LowRank], LowRank]) -> Patch:
        layers = []
        for layer in self.layers:
            mapped = {name: function(f) for name, f in layer.items()}
            layers.append({name: f for name, f in mapped.items() if f.rank})
        return Patch(tuple(layers))


class FactorSize(NamedTuple):
    """Factors of one rank: ``bits`` of an entry (up to 8: codes), ``rows`` of all of them, their number."""

    rank: int
    bits: int
    rows: int
    factors: int


def patch_bytes(sizes: Sequence[FactorSize], rank: int) -> int:
    """``nbytes`` of a patch of these `Patch.sizes` that is truncated to ``rank``."""
    total = 0
    for size in sizes:
        kept = min(size.rank, rank)
        total += size.rows * -(-kept * size.bits // 8)
        total += 4 * kept * size.factors if size.bits <= 8 else 0  # scales
    return total


class Formed(NamedTuple):
    """A patch and the share of the deficit's energy it keeps (1.0 for a deficit of zero)."""

    patch: Patch
    energy: float


def floats(factor: Factor) -> torch.Tensor:
    """A factor in floats: itself, or its codes times their scales."""
    return factor.dense() if isinstance(factor, Codes) else factor


def _significant(s: torch.Tensor, rank: int | None) -> int:
    """Number of the descending singular values ``s`` that carry signal, at most ``rank``."""
    if s.numel() == 0 or float(s[0]) == 0.0:
        return 0
    count = int((s > s[0] * _NOISE).sum())
    return count if rank is None else min(count, rank)


def _prefix(factor: Factor, rank: int) -> Factor:
    return factor.truncate(rank) if isinstance(factor, Codes) else factor[:, :rank]
