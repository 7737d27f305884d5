"""Factors in few bits: one integer code per entry, one scale per column.

A column of a factor is one direction of a patch. Its entries are of one magnitude, so one scale fits them;
columns differ by orders of magnitude, so each has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange

Bits = Literal[4, 8]
"""Bits of a code. 8 and 4 bits resolve 1/127 and 1/7 of the largest entry of a column."""

_LEVELS: dict[Bits, int] = {8: 127, 4: 7}


@dataclass(frozen=True, eq=False)
class Codes:
    """A matrix ``[rows, columns]`` as integers times one scale per column.

    ``codes`` is int8 ``[rows, columns]``, or uint8 ``[rows, ⌈columns / 2⌉]`` for 4 bits: column ``2j`` in
    the low half of byte ``j``, column ``2j + 1`` in the high half, each plus 8. ``scales`` is float32
    ``[columns]``. Raises ValueError for other dtypes and shapes.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        if self.scales.dim() != 1 or self.scales.dtype != torch.float32:
            raise ValueError(
                f"scales must be float32 [columns], got {self.scales.dtype} {tuple(self.scales.shape)}"
            )
        columns = self.scales.shape[0]
        held = {torch.int8: columns, torch.uint8: -(-columns // 2)}.get(self.codes.dtype)
        if self.codes.dim() != 2 or self.codes.shape[1] != held:
            raise ValueError(
                f"codes of {columns} columns must be int8 [rows, {columns}] or uint8 "
                f"[rows, {-(-columns // 2)}], got {self.codes.dtype} {tuple(self.codes.shape)}"
            )

    @property
    def bits(self) -> Bits:
        """Bits of a code."""
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the decoded matrix."""
        return self.codes.shape[0], self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + 4 * self.scales.numel()

    def dense(self) -> torch.Tensor:
        """The matrix in float32."""
        return self._integers() * self.scales

    def truncate(self, columns: int) -> Codes:
        """The first ``columns`` columns (all of them if there are fewer)."""
        kept = self.scales[:columns]
        held = kept.shape[0] if self.bits == 8 else -(-kept.shape[0] // 2)
        return Codes(self.codes[:, :held], kept)

    def _integers(self) -> torch.Tensor:
        if self.bits == 8:
            return self.codes.to(torch.float32)
        pairs = torch.stack((self.codes & 15, self.codes >> 4), dim=2)
        halves = rearrange(pairs, "rows pairs pair -> rows (pairs pair)")
        return halves[:, : self.scales.shape[0]].to(torch.float32) - 8


def quantize(x: torch.Tensor, bits: Bits = 8) -> Codes:
    """Round every column of ``x`` ``[rows, columns]`` to ``bits`` bits, symmetrically about zero.

    No entry is off by more than half a step, which is the column's largest entry / 127 (8 bits) or / 7
    (4 bits). Raises ValueError for entries that are not finite (their codes would decode to numbers) and
    for other widths.
    """
    if bits not in _LEVELS:
        raise ValueError(f"bits {bits} is none of {sorted(_LEVELS)}")
    if x.dim() != 2:
        raise ValueError(f"a factor must be [rows, columns], got {tuple(x.shape)}")
    levels = _LEVELS[bits]
    wide = x.to(torch.float64)
    peak = wide.abs().amax(0) if x.shape[0] else wide.new_zeros(x.shape[1])
    scales = (peak / levels).to(torch.float32)
    if not bool(scales.isfinite().all()):
        raise ValueError("a factor with entries that are not finite cannot be coded in integers")
    step = scales.to(torch.float64)
    step = torch.where(step > 0, step, torch.ones_like(step))
    integers = (wide / step).round().clamp(-levels, levels).to(torch.int8)
    return Codes(integers if bits == 8 else _pack(integers), scales)


def coded_bytes(rows: int, columns: int, bits: Bits) -> int:
    """Bytes of a coded matrix of this shape (`Codes.nbytes`)."""
    return rows * (columns if bits == 8 else -(-columns // 2)) + 4 * columns


def _pack(integers: torch.Tensor) -> torch.Tensor:
    halves = (integers + 8).to(torch.uint8)
    if halves.shape[1] % 2:
        halves = torch.cat((halves, torch.full_like(halves[:, :1], 8)), dim=1)
    return halves[:, 0::2] | (halves[:, 1::2] << 4)
