"""Positions of an object's tensors in its file, and the pieces in which they are read and verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from kamera.store.digests import Hasher

PIECE = 8 * 2**20
"""Bytes of tensors that have a digest of their own: threads read and verify pieces side by side."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


class TensorEntry(NamedTuple):
    """One tensor: dtype, shape, and the range of its bytes, counted from the end of the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    def to_header(self) -> dict[str, Any]:
        """The entry in the form of a safetensors header."""
        return {
            "dtype": DTYPES[self.dtype],
            "shape": list(self.shape),
            "data_offsets": [self.start, self.end],
        }


def meta_tensor_of(entry: Mapping[str, Any]) -> torch.Tensor:
    """A tensor without memory, as `TensorEntry.to_header` says it.

    Raises `LookupError`, `TypeError`, `ValueError` or `OverflowError` for an entry that says none.
    """
    try:
        return torch.empty(entry["shape"], dtype=_TORCH[entry["dtype"]], device="meta")
    except RuntimeError as error:
        raise ValueError(f"a shape is impossible: {error}") from error


def file_entries(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """The entry of each tensor, in the order of the file. Raises `ValueError` for a dtype without a name."""
    entries: dict[str, TensorEntry] = {}
    offset = 0
    # widest first, so that every tensor starts at a multiple of its element size
    for name in sorted(tensors, key=lambda n: (-tensors[n].element_size(), n)):
        tensor = tensors[name]
        if tensor.dtype not in DTYPES:
            raise ValueError(f"tensor {name!r}: {tensor.dtype} cannot be stored")
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = TensorEntry(tensor.dtype, tuple(tensor.shape), offset, end)
        offset = end
    return entries


def pieces_of(size: int) -> list[tuple[int, int]]:
    """Where each piece of ``size`` bytes begins and ends."""
    return [(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]


def count_pieces(size: int) -> int:
    """The number of pieces of ``size`` bytes, which a header may claim to be any."""
    return len(range(0, size, PIECE))


def piece_digests(tensors: Iterable[memoryview], begin: Callable[[], Hasher]) -> list[str]:
    """The digest of each piece of these bytes, one behind another, by the hash that ``begin`` makes."""
    digests: list[str] = []
    hasher, room = begin(), PIECE
    for view in tensors:
        while len(view):
            size = min(len(view), room)
            hasher.update(view[:size])
            view, room = view[size:], room - size
            if not room:
                digests.append(hasher.hexdigest())
                hasher, room = begin(), PIECE
    return digests if room == PIECE else [*digests, hasher.hexdigest()]
