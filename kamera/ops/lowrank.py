"""Low-rank factors of a deficit, in floats or in codes, and patches of them.

The directions of all layers of a channel stand side by side in one pair of matrices, so that a patch is a few
tensors, whatever the model's depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from kamera.ops.kv import Blocks, Groups
from kamera.ops.quantize import Codes

Factor = torch.Tensor | Codes
"""One factor: floats ``[rows, m]``, or codes of such a matrix."""

Deltas = Blocks[torch.Tensor]
"""A deficit: channel -> ``[layers, tokens, features]`` for each group of equal layers."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """Factors of one channel's deficit: Δ ≈ ``left @ right.T``.

    ``left`` is ``[tokens, m]``, ``right`` ``[features, m]`` (heads flattened), each in floats or as
    `Codes`. Columns are ordered by energy, so a prefix of them is the best approximation of its rank.
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
class LowRanks:
    """Factors of one channel of several layers: ``left`` ``[tokens, m]`` and ``right`` ``[features, m]``.

    The n-th layer has ``ranks[n]`` columns, from ``starts[n]`` on; an item is its `LowRank`, a view. In
    codes of 4 bits a column of zeros follows an odd number, since two columns share their bytes.
    """

    left: Factor
    right: Factor
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not all(type(rank) is int and rank >= 0 for rank in self.ranks):
            raise ValueError(f"ranks {self.ranks} of factors are no whole numbers")
        if {self.left.shape[1], self.right.shape[1]} != {self.starts[-1]}:
            raise ValueError(
                f"ranks {self.ranks} do not fit factors of {self.left.shape[1]} and {self.right.shape[1]} "
                "columns"
            )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first column of each layer, and the number of all columns."""
        pairs, at, found = _in_pairs(self.left) or _in_pairs(self.right), 0, [0]
        for rank in self.ranks:
            at += rank + (rank & 1 if pairs else 0)
            found.append(at)
        return tuple(found)

    @cached_property
    def columns(self) -> torch.Tensor:
        """The first column of each layer and its rank, int32 ``[layers, 2]``, on the factors' device."""
        held = self.left.codes if isinstance(self.left, Codes) else self.left
        with torch.inference_mode(False):  # as in `kamera.ops.rope.rotation_table`
            return torch.tensor([*zip(self.starts, self.ranks, strict=False)], dtype=torch.int32).to(
                held.device
            )

    @classmethod
    def of(cls, layers: Sequence[LowRank | None]) -> LowRanks | None:
        """The factors of layers, side by side (copies); None if none has any. Mixed forms become floats."""
        held = [low for low in layers if low is not None and low.rank]
        if not held:
            return None
        kinds = {
            (type(x), x.bits if isinstance(x, Codes) else 0) for low in held for x in (low.left, low.right)
        }
        sides = [[low.left for low in held], [low.right for low in held]]
        if len(kinds) > 1:
            sides = [[floats(x) for x in side] for side in sides]
        left, right = map(_join_columns, sides)
        return cls(left, right, tuple(0 if low is None else low.rank for low in layers))

    def __getitem__(self, layer: int) -> LowRank:
        start, rank = self.starts[:-1][layer], self.ranks[layer]
        return LowRank(_columns(self.left, start, rank), _columns(self.right, start, rank))

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(self.ranks, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of both factors, scales of codes included."""
        return self.left.nbytes + self.right.nbytes

    def truncate(self, rank: int) -> LowRanks | None:
        """The ``rank`` strongest directions of each layer; itself if it has no more, None if that is none."""
        if rank < 0:
            raise ValueError(f"rank {rank} is negative")
        if self.rank <= rank:
            return self
        return LowRanks.of([self[n].truncate(rank) for n in range(len(self.ranks))])

    def pad(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both factors in floats by layer, ``[layers, rows, rank]``: zeros beyond a layer's own rank."""
        starts, ranks = torch.tensor(self.starts[:-1]), torch.tensor(self.ranks)
        steps = torch.arange(self.rank)
        held = steps < ranks[:, None]
        at = torch.where(held, starts[:, None] + steps, 0).flatten()

        def by_layer(side: torch.Tensor) -> torch.Tensor:
            some = side[:, at.to(side.device)].unflatten(1, held.shape) * held.to(side.device)
            return some.transpose(0, 1)

        return by_layer(floats(self.left)), by_layer(floats(self.right))

    def tensors(self) -> dict[str, torch.Tensor]:
        """As `LowRank.tensors`."""
        return LowRank(self.left, self.right).tensors()

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> LowRanks:
        """The factors from the `tensors` of another; `KeyError` names a missing one."""
        both = LowRank.from_tensors(tensors)
        return cls(both.left, both.right, tuple(ranks))


@dataclass(frozen=True, eq=False)
class Patch:
    """Low-rank factors for every layer and channel of one chunk behind given antecedents.

    A channel that is not named is not corrected (layer 0 never needs it: no attention precedes it).
    """

    blocks: Blocks[LowRanks]

    @classmethod
    def of(cls, layers: Sequence[Mapping[str, LowRank]], groups: Groups | None = None) -> Patch:
        """The patch of layers in decoder order, in ``groups`` (by default each layer apart)."""
        groups = tuple((i,) for i in range(len(layers))) if groups is None else groups
        parts = []
        for group in groups:
            names = dict.fromkeys(name for i in group for name in layers[i])
            made = {name: LowRanks.of([layers[i].get(name) for i in group]) for name in names}
            parts.append({name: factors for name, factors in made.items() if factors is not None})
        return cls(Blocks(parts, groups))

    @property
    def groups(self) -> Groups:
        """The decoder layers of each block."""
        return self.blocks.groups

    def regroup(self, groups: Groups) -> Patch:
        """The patch in other groups: itself if they are its own."""
        return self if self.groups == groups else Patch.of(self.layers, groups)

    @cached_property
    def layers(self) -> tuple[Mapping[str, LowRank], ...]:
        """Channel -> factors of each layer, views; what is not corrected is not named."""
        found: dict[int, dict[str, LowRank]] = {}
        for block, layers in zip(self.blocks.parts, self.groups, strict=True):
            for row, layer in enumerate(layers):
                found[layer] = {name: low[row] for name, low in block.items() if low.ranks[row]}
        return tuple(found[layer] for layer in range(len(found)))

    @cached_property
    def rank(self) -> int:
        """The largest rank of any channel."""
        return max([low.rank for block in self.blocks.parts for low in block.values()], default=0)

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the chunk it corrects, or None if it corrects nothing."""
        for block in self.blocks.parts:
            for low in block.values():
                return low.left.shape[0]
        return None

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum([low.nbytes for block in self.blocks.parts for low in block.values()])

    def truncate(self, rank: int) -> Patch:
        """Keep the ``rank`` strongest directions of every channel; rank 0 corrects nothing."""
        if 0 <= self.rank <= rank:
            return self
        cut = [{name: low.truncate(rank) for name, low in block.items()} for block in self.blocks.parts]
        parts = [{name: low for name, low in block.items() if low is not None} for block in cut]
        return Patch(Blocks(parts, self.groups))

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that hold it."""
        return [t for block in self.blocks.parts for low in block.values() for t in low.tensors().values()]


class Formed(NamedTuple):
    """A patch and the share of the deficit's energy it keeps (1.0 for a deficit of zero)."""

    patch: Patch
    energy: float


def floats(factor: Factor) -> torch.Tensor:
    """A factor in floats: itself, or its codes times their scales."""
    return factor.dense() if isinstance(factor, Codes) else factor


def _prefix(factor: Factor, rank: int) -> Factor:
    return factor.truncate(rank) if isinstance(factor, Codes) else factor[:, :rank]


def _in_pairs(factor: Factor) -> bool:
    return isinstance(factor, Codes) and factor.bits == 4


def _columns(factor: Factor, start: int, count: int) -> Factor:
    if not isinstance(factor, Codes):
        return factor[:, start : start + count]
    step = 2 if factor.bits == 4 else 1
    codes = factor.codes[:, start // step : -(-(start + count) // step)]
    return Codes(codes, factor.scales[start : start + count])


def _join_columns(sides: Sequence[Factor]) -> Factor:
    """Factors of one form side by side; of 4 bits each with an even number of columns."""
    codes = [side for side in sides if isinstance(side, Codes)]
    if not codes:
        return torch.cat([side for side in sides if isinstance(side, torch.Tensor)], dim=1)
    even = codes[0].bits == 4
    scales = [torch.nn.functional.pad(c.scales, (0, c.shape[1] % 2 if even else 0)) for c in codes]
    return Codes(torch.cat([c.codes for c in codes], dim=1), torch.cat(scales))
