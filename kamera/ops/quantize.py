"""Factors and KV in few bits.

A column of a factor is one direction of a patch: its entries are of one magnitude, so one scale fits them.

Keys have channels that are large at every token, so keys are grouped per channel, over tokens: a large
channel does not coarsen its neighbours. Values have no such channels, and attention reads few tokens at a
time, so values are grouped per token: an error stays with its token (KIVI, 2024; KVQuant, 2024, for keys).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from einops import rearrange

from kamera.ops.kv import KV, Blocks, Groups

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


KVCodec = Literal["int8", "int4"]
"""Forms of KV in codes of 8 or 4 bits."""
KV_CODECS: tuple[KVCodec, ...] = get_args(KVCodec)
"""All of them."""

Axis = Literal["tokens", "features"]
"""Axis of a group: the tokens of a channel, or the features of a token (of one head)."""

_DIM: dict[Axis, int] = {"tokens": -2, "features": -1}
_LARGEST = torch.finfo(torch.float32).max / 4  # beyond it, code times step could overflow


@dataclass(frozen=True)
class Grid:
    """Bits of a code (8 or 4), and values per group (one step and one low); 0: the whole axis."""

    bits: int
    group: int

    def __post_init__(self) -> None:
        if type(self.bits) is not int or type(self.group) is not int:
            raise ValueError(f"bits {self.bits!r} and group {self.group!r} must be whole numbers")
        if self.bits not in (4, 8) or self.group < 0:
            raise ValueError(f"bits {self.bits} must be 4 or 8, group {self.group} at least 0")

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def groups(self, length: int) -> int:
        """Number of groups along an axis of ``length`` values."""
        return -(-length // (self.group or max(length, 1)))


GRIDS: Mapping[str, Grid] = {"int8": Grid(8, 0), "int4": Grid(4, 32)}
"""Grid of each codec. Keys of stored objects contain the name, so a changed grid needs a new name."""


def axis_of(channel: str) -> Axis:
    """Grouping axis of a channel: keys (k, k_pe, k_idx) over tokens, others over features."""
    return "tokens" if channel.startswith("k") else "features"


@dataclass(frozen=True, eq=False)
class CodedChannel:
    """One channel ``[…, heads, tokens, dim]``: value = code · step + low, all of its group.

    ``codes`` is uint8 ``[…, heads, tokens, dim]``, or ``[…, heads, ⌈tokens / 2⌉, dim]`` for 4 bits: token
    ``2t`` in the low half of a byte, ``2t + 1`` in the high half. ``steps`` and ``lows`` have the dtype
    of the values and their shape, except that ``axis`` has one entry per group. A block has its layers in
    front; an item of it is one layer. Raises ValueError for other dtypes and shapes.
    """

    codes: torch.Tensor
    steps: torch.Tensor
    lows: torch.Tensor
    tokens: int
    axis: Axis
    grid: Grid

    def __post_init__(self) -> None:
        if self.axis not in _DIM:
            raise ValueError(f"axis {self.axis!r} is none of {', '.join(_DIM)}")
        held = self.tokens if self.grid.bits == 8 else -(-self.tokens // 2)
        codes = self.codes
        if codes.dtype != torch.uint8 or codes.dim() < 3 or codes.shape[-2] != held:
            raise ValueError(
                f"{self.grid.bits}-bit codes of {self.tokens} tokens must be uint8 [heads, {held}, dim], "
                f"got {codes.dtype} {tuple(codes.shape)}"
            )
        grouped = list(self.shape)
        grouped[_DIM[self.axis]] = self.grid.groups(grouped[_DIM[self.axis]])
        for name, tensor in (("steps", self.steps), ("lows", self.lows)):
            if list(tensor.shape) != grouped:
                raise ValueError(f"{name} must be {grouped}, got {list(tensor.shape)}")
        if self.steps.dtype != self.lows.dtype or not _codable(self.steps.dtype):
            raise ValueError(f"steps of {self.steps.dtype} with lows of {self.lows.dtype}")

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, tokens, dim) of the decoded channel."""
        return (*self.codes.shape[:-2], self.tokens, self.codes.shape[-1])

    def __getitem__(self, layer: int) -> CodedChannel:
        codes, steps, lows = self.codes[layer], self.steps[layer], self.lows[layer]
        return CodedChannel(codes, steps, lows, self.tokens, self.axis, self.grid)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, steps and lows."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.steps, self.lows))

    def to(self, device: torch.device) -> CodedChannel:
        """A copy on ``device``; ``self`` if it is there already."""
        if self.codes.device == device:
            return self
        codes, steps, lows = (t.to(device) for t in (self.codes, self.steps, self.lows))
        return CodedChannel(codes, steps, lows, self.tokens, self.axis, self.grid)

    def dense(self) -> torch.Tensor:
        """The values ``[…, heads, tokens, dim]`` in their own dtype, on the codes' device."""
        dtype = self.steps.dtype
        wide = torch.promote_types(dtype, torch.float32)
        steps, lows = (self._spread(t.to(wide)) for t in (self.steps, self.lows))
        largest = torch.finfo(dtype).max  # the last code may exceed it by a fraction of a step
        return self._integers().to(wide).mul_(steps).add_(lows).clamp_(-largest, largest).to(dtype)

    def _integers(self) -> torch.Tensor:
        if self.grid.bits == 8:
            return self.codes
        halves = torch.stack((self.codes & 15, self.codes >> 4), dim=-2)
        return rearrange(halves, "... pairs pair dim -> ... (pairs pair) dim")[..., : self.tokens, :]

    def _spread(self, grouped: torch.Tensor) -> torch.Tensor:
        if not self.grid.group:
            return grouped  # one group: it broadcasts
        dim = _DIM[self.axis]
        return grouped.repeat_interleave(self.grid.group, dim).narrow(dim, 0, self.shape[dim])


@dataclass(frozen=True)
class Loss:
    """Error of a coded KV: relative (Frobenius norm), overall and by channel; largest of any value."""

    relative: float
    largest: float
    channels: Mapping[str, float]

    def __post_init__(self) -> None:
        for value in (self.relative, self.largest, *self.channels.values()):
            if not isinstance(value, float | int) or not 0.0 <= value < math.inf:
                raise ValueError(f"a loss must be a number of at least 0, got {value!r}")


class CodedKV(Blocks[torch.Tensor]):
    """A KV in codes, ``codes`` by block and channel.

    As a `KV` its parts are the decoded values, decoded again at every read: take `dense` first to read it
    more than once. Raises ValueError for channels of several grids.
    """

    def __init__(self, codes: Blocks[CodedChannel], grid: Grid, loss: Loss) -> None:
        axes: dict[str, Axis] = {}
        for block, layers in zip(codes.parts, codes.groups, strict=True):
            for name, channel in block.items():
                if channel.grid != grid or channel.axis != axes.setdefault(name, channel.axis):
                    raise ValueError(
                        f"layer {layers[0]} channel {name!r} is coded in another way than the others"
                    )
        super().__init__([_Decoded(block) for block in codes.parts], codes.groups)
        self.codes, self.grid, self.loss = codes, grid, loss

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [_Decoded(layer) for layer in self.codes[index]]
        return _Decoded(self.codes[index])

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        return map(_Decoded, self.codes)

    def contents(self) -> Iterator[torch.Tensor]:
        """Codes, steps and lows of all channels."""
        for coded in self.codes.parts:
            for channel in coded.values():
                yield from (channel.codes, channel.steps, channel.lows)

    def dense(self) -> KV:
        """The values, decoded once."""
        return Blocks([dict(block) for block in self.parts], self.groups)

    def regroup(self, groups: Groups) -> CodedKV:
        """The codes in other groups of layers (copies)."""
        layers, parts = list(self.codes), list[dict[str, CodedChannel]]()
        for group in groups:
            parts.append({})
            for name, first in layers[group[0]].items():
                held = [layers[i][name] for i in group]
                codes, steps, lows = (
                    torch.stack([getattr(channel, part) for channel in held])
                    for part in ("codes", "steps", "lows")
                )
                parts[-1][name] = CodedChannel(codes, steps, lows, first.tokens, first.axis, first.grid)
        return CodedKV(Blocks(parts, groups), self.grid, self.loss)

    def to(self, devices: Sequence[torch.device | None]) -> CodedKV:
        """The codes of every block on its device (None: unchanged); ``self`` if nothing moves."""
        parts = [
            {name: c if d is None else c.to(d) for name, c in block.items()}
            for block, d in zip(self.codes.parts, devices, strict=True)
        ]
        same = all(
            new[name] is old[name] for new, old in zip(parts, self.codes.parts, strict=True) for name in new
        )
        return self if same else CodedKV(Blocks(parts, self.groups), self.grid, self.loss)

    @property
    def tokens(self) -> int:
        """Tokens it holds; nothing is decoded."""
        return next((channel.tokens for block in self.codes.parts for channel in block.values()), 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, steps and lows of all channels."""
        return sum(channel.nbytes for block in self.codes.parts for channel in block.values())


class _Decoded(Mapping[str, torch.Tensor]):
    def __init__(self, channels: Mapping[str, CodedChannel]) -> None:
        self._channels = channels

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._channels[name].dense()

    def __iter__(self) -> Iterator[str]:
        return iter(self._channels)

    def __len__(self) -> int:
        return len(self._channels)


def code_kv(kv: KV, codec: KVCodec) -> CodedKV:
    """``kv`` in codes, on the CPU, with their error. Equal values give equal codes on every machine.

    No value is off by more than half a step of its group, and a step is the group's range / 255 (int8)
    or / 15 (int4), rounded up in the values' dtype. Raises ValueError, naming layer and channel, for
    values that are not finite (their codes would decode to numbers) or of a dtype without codes.
    """
    if codec not in GRIDS:
        raise ValueError(f"codec {codec!r} is none of {', '.join(KV_CODECS)}")
    coded: list[dict[str, CodedChannel]] = []
    energy: dict[str, float] = {}
    missed: dict[str, float] = {}
    largest = 0.0
    for block, layers in zip(kv.parts, kv.groups, strict=True):
        coded.append({})
        for name, tensor in block.items():
            coded[-1][name] = _code_block(tensor, name, layers, GRIDS[codec])
            wide = _wide(tensor)
            off = _wide(coded[-1][name].dense()).sub_(wide)
            energy[name] = energy.get(name, 0.0) + _energy(wide)
            missed[name] = missed.get(name, 0.0) + _energy(off)
            largest = max(largest, float(off.abs_().max()) if off.numel() else 0.0)
    overall = _relative(sum(missed.values()), sum(energy.values()))
    each = {name: _relative(missed[name], energy[name]) for name in energy}
    return CodedKV(Blocks(coded, kv.groups), GRIDS[codec], Loss(overall, _short(largest), each))


def _code_block(tensor: torch.Tensor, name: str, layers: Sequence[int], grid: Grid) -> CodedChannel:
    """`code_channel` of a block. Its error names the first layer that has no codes."""
    try:
        return code_channel(tensor, axis_of(name), grid)
    except ValueError:
        for layer, one in zip(layers, tensor, strict=True):
            try:
                code_channel(one, axis_of(name), grid)
            except ValueError as error:
                raise ValueError(f"layer {layer} channel {name!r} {error}; store it as it is") from None
        raise


def code_channel(x: torch.Tensor, axis: Axis, grid: Grid) -> CodedChannel:
    """``x`` ``[…, heads, tokens, dim]`` in codes; raises ValueError for the values that `code_kv` refuses."""
    if not _codable(x.dtype):
        raise ValueError(f"of {x.dtype} has no codes")
    wide = _wide(x)
    dim = wide.dim() + _DIM[axis]
    # NaN compares false; an empty channel has no largest value
    if wide.numel() and not float(wide.abs().max()) <= _LARGEST:
        raise ValueError("holds values that are not finite, or too large for codes")
    length = wide.shape[dim]
    group, count = grid.group or max(length, 1), grid.groups(length)
    if count * group > length:  # padding with the last value changes neither minimum nor maximum
        last = wide.narrow(dim, length - 1, 1)
        wide = torch.cat((wide, *[last] * (count * group - length)), dim)
    grouped = wide.unflatten(dim, (count, group))
    lows, highs = grouped.amin(dim + 1), grouped.amax(dim + 1)
    steps = _round_up((highs - lows) / grid.levels, x.dtype)
    divisor = steps.to(wide.dtype)
    divisor = torch.where(divisor > 0, divisor, torch.ones_like(divisor)).unsqueeze(dim + 1)
    exact = (grouped - lows.unsqueeze(dim + 1)).div_(divisor)
    codes = exact.round_().clamp_(0, grid.levels).to(torch.uint8)
    codes = codes.flatten(dim, dim + 1).narrow(dim, 0, length).contiguous()
    packed = codes if grid.bits == 8 else _pack_halves(codes)
    return CodedChannel(packed, steps, lows.to(x.dtype), x.shape[-2], axis, grid)


def _codable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2


def _round_up(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` (≥ 0, same or wider dtype) rounded up to values of ``dtype``."""
    near = x.to(dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    above = (near.view(bits) + 1).view(dtype)  # the next positive float
    return torch.where(near.to(x.dtype) < x, above, near)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to("cpu", torch.promote_types(x.dtype, torch.float32))


def _energy(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _pack_halves(codes: torch.Tensor) -> torch.Tensor:
    if codes.shape[-2] % 2:
        codes = torch.cat((codes, torch.zeros_like(codes[..., :1, :])), dim=-2)
    return codes[..., 0::2, :] | (codes[..., 1::2, :] << 4)


def _relative(missed: float, energy: float) -> float:
    return _short(math.sqrt(missed / energy)) if energy else 0.0


def _short(value: float) -> float:
    return float(f"{value:.4g}")
