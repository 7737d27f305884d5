"""The deficit of a chunk from a few of its tokens: the choice of these, and the completion of the others.

Tokens whose KV is alike change alike in new company. So a kernel over a chunk's tokens, made of its own KV,
says before anything runs which few tell the most about the others, and how much they leave open. The changes
of those few, once computed, are completed to all by kernel ridge regression, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from kamera.ops.kv import KV, kv_tokens
from kamera.ops.layout import Channel, Layout
from kamera.ops.rope import RopeSpec, rotate_tokens, token_rotations

WIDTH = 0.5
"""Width of the kernel, in median distances between tokens."""

RIDGES = (1e-3, 1e-2, 1e-1)
"""Ridges of the regression, of which each channel takes that with the smallest leave-one-out error."""

LEAST = 0.25
"""Smallest share that is taken by estimate: below it losses begin that the estimate does not see."""

MOST = 0.5
"""Largest share of a chunk's tokens that is run for the others: beyond it, all of them are."""


@dataclass(frozen=True)
class SampleSize:
    """How much of a chunk was run behind its antecedents: ``tokens``, and the ``error`` that is estimated.

    The error is the share of the kernel's variance that these tokens leave open (`Design`). ``base`` names
    the antecedents of the KV that the others were completed from: "" of a canonical, which has none.
    """

    tokens: int
    error: float
    base: str = ""

    def to_info(self) -> dict[str, Any]:
        """The size as written to a record's ``info``."""
        return {"sample": asdict(self)}

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> SampleSize | None:
        """The size in a record's ``info`` (any JSON to the format); None if it holds no valid one."""
        told = info.get("sample")
        if not isinstance(told, dict) or told.keys() != {"tokens", "error", "base"}:
            return None
        tokens, error, base = told["tokens"], told["error"], told["base"]
        valid = type(tokens) is int and tokens > 0 and isinstance(error, int | float) and 0.0 <= error <= 1.0
        return cls(tokens, float(error), base) if valid and isinstance(base, str) else None


def token_kernel(kv: KV, layout: Layout, positions: torch.Tensor) -> torch.Tensor:
    """Likeness of a chunk's tokens, float32 ``[tokens, tokens]`` on the CPU: 1.0 for equal ones.

    ``kv`` is the chunk's at ``positions`` ``[axes, tokens]``. Phased channels are compared with every token
    turned to position 0, and each channel of each layer counts by its own energy.
    """
    tokens, turns = kv_tokens(kv), TurnTables(positions)
    products = torch.zeros(tokens, tokens, dtype=torch.float32)
    for x, channel in _channels(kv, layout):
        x = turns.back(x.float(), channel).transpose(0, 1).flatten(1)  # [tokens, features]
        x = x / torch.linalg.vector_norm(x).clamp_min(1e-15)
        products = products.to(x.device) + x @ x.T
    products = products.cpu()
    own = products.diagonal()
    apart = (own[:, None] + own[None] - 2 * products).clamp_min(0.0)
    if tokens < 2:
        return torch.ones(tokens, tokens, dtype=torch.float32)
    others = apart[torch.ones(tokens, tokens, dtype=torch.bool).triu(1)]
    return torch.exp(-apart / (2 * WIDTH**2 * others.median().clamp_min(1e-12)))


def _channels(kv: KV, layout: Layout) -> Iterator[tuple[torch.Tensor, Channel]]:
    for block, layers in zip(kv.parts, kv.groups, strict=True):
        for channel in layout[layers[0]].channels:
            for x in block[channel.name]:
                yield x, channel


@dataclass(frozen=True, eq=False)
class Design:
    """The tokens of a chunk that explain most of the others, the best first: at most `MOST` of them.

    ``order`` int64 ``[most]``; ``open`` float32 ``[most + 1]``: the share of the kernel's variance that the
    first ``k`` leave unexplained. ``columns`` ``[tokens, most]`` are the kernel's, in this order.
    """

    order: torch.Tensor
    open: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, kernel: torch.Tensor) -> Design:
        """The greedy D-optimal design of a kernel ``[tokens, tokens]``: the order of pivoted Cholesky."""
        tokens = kernel.shape[0]
        most = int(MOST * tokens)
        factor, left = torch.zeros_like(kernel[:most]), kernel.diagonal().clone()
        order, opened = torch.zeros(most, dtype=torch.int64), torch.ones(most + 1, dtype=torch.float32)
        whole, taken = left.sum().clamp_min(1e-30), torch.zeros(tokens, dtype=torch.bool)
        for k in range(most):
            i = int(left.masked_fill(taken, -1.0).argmax())
            order[k], taken[i] = i, True
            if float(left[i]) > 1e-6:
                factor[k] = (kernel[i] - factor[:k, i] @ factor[:k]) / left[i].sqrt()
                left = (left - factor[k].square()).clamp_min(0.0)
            left[i] = 0.0
            opened[k + 1] = left.sum() / whole
        return cls(order, opened, kernel[:, order])

    def size(self, share: float | None, max_error: float) -> SampleSize | None:
        """The sample of a ``share`` of the tokens, or (None) the smallest with at most ``max_error`` open.

        That is no smaller than `LEAST`. None if it leaves more open, or is larger than `MOST` of the tokens.
        """
        tokens, most = self.columns.shape[0], len(self.open) - 1
        count = min(most, max(1, round((LEAST if share is None else share) * tokens)))
        if share is None:
            count = max(count, int((self.open > max_error).sum()))
        if not 0 < count <= most or float(self.open[count]) > max_error:
            return None
        return SampleSize(count, round(float(self.open[count]), 6))

    def completion(self, count: int, positions: torch.Tensor) -> Completion:
        """The completion from the first ``count`` tokens of a chunk at ``positions`` ``[axes, tokens]``."""
        rows, places = self.order[:count].sort()
        return Completion(rows, self.columns[:, :count][:, places], positions)


@dataclass(frozen=True, eq=False)
class Completion:
    """Estimates the changes of all tokens of a chunk from those of ``rows`` (int64, ascending).

    ``columns`` ``[tokens, rows]`` are the columns of ``rows`` in the chunk's kernel; the chunk stands at
    ``positions`` ``[axes, tokens]``.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def none(cls, rows: torch.Tensor, positions: torch.Tensor) -> Completion:
        """A completion that leaves the tokens other than ``rows`` as they are, to rounding."""
        columns = torch.zeros(positions.shape[1], len(rows), dtype=torch.float32)
        columns[rows, torch.arange(len(rows))] = 1.0
        return cls(rows, columns, positions)

    def complete(self, channel: Channel, base: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        """A layer's channel ``[heads, tokens, dim]``: ``fresh`` ``[heads, rows, dim]`` where it was computed.

        The other tokens are ``base`` and their completed change. Changes are completed with every token
        turned to position 0.
        """
        rows = self.rows.to(base.device)
        turned = self._turns.back(base.float(), channel)
        change = self._turns.back(fresh.float(), channel, rows) - turned[:, rows]
        flat = change.transpose(0, 1).flatten(1)  # [rows, features]
        whole = (self._weights(flat) @ flat).unflatten(1, (change.shape[0], change.shape[2]))
        out = self._turns.forth(turned + whole.transpose(0, 1), channel).to(base.dtype)
        out[:, rows] = fresh
        return out

    def _weights(self, change: torch.Tensor) -> torch.Tensor:
        """``[tokens, rows]``, of the ridge whose leave-one-out error is smallest."""
        if change.device not in self._by_device:  # every layer asks for them
            self._by_device[change.device] = tuple(x.to(change.device) for x in self._solution)
        inverses, weights = self._by_device[change.device]
        missed = (inverses @ change) / inverses.diagonal(dim1=1, dim2=2)[:, :, None]
        return weights[missed.square().sum(dim=(1, 2)).argmin()]

    @cached_property
    def _solution(self) -> tuple[torch.Tensor, torch.Tensor]:
        eye = torch.eye(len(self.rows), dtype=torch.float64)
        among = self.columns[self.rows].double()
        inverses = torch.linalg.inv(torch.stack([among + ridge * eye for ridge in RIDGES]))
        return inverses.float(), (self.columns.double() @ inverses).float()

    @cached_property
    def _by_device(self) -> dict[torch.device, tuple[torch.Tensor, ...]]:
        return {}

    @cached_property
    def _turns(self) -> TurnTables:
        return TurnTables(self.positions)


class TurnTables:
    """Turns tokens at ``positions`` ``[axes, tokens]`` back to position 0, and forth; its tables are kept."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._positions = positions
        self._tables: dict[tuple[RopeSpec, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def back(self, x: torch.Tensor, channel: Channel, rows: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` ``[heads, tokens, dim]``, of the tokens ``rows`` if given, at position 0."""
        return self._turn(x, channel, rows, back=True)

    def forth(self, x: torch.Tensor, channel: Channel) -> torch.Tensor:
        """What `back` made, at its positions."""
        return self._turn(x, channel, None, back=False)

    def _turn(self, x: torch.Tensor, channel: Channel, rows: torch.Tensor | None, back: bool) -> torch.Tensor:
        if channel.rope is None:
            return x
        key = channel.rope, x.device
        if key not in self._tables:
            self._tables[key] = token_rotations(channel.rope, self._positions, x.device)
        cos, sin = (t if rows is None else t[rows] for t in self._tables[key])
        return rotate_tokens(x, channel.rope, (cos, -sin if back else sin), channel.rotary_start)
