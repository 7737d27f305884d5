"""Positions of an object's tensors in its file, and the groups that are read and verified together.

A group is a channel of a block, a patch, the embeds, or all the small tensors: threads read and verify
groups in parallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

HEAD, EMBEDS, PATCH = "head", "embeds", "patch"
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

    def told(self) -> dict[str, Any]:
        """The entry in the form of a safetensors header."""
        return {
            "dtype": DTYPES[self.dtype],
            "shape": list(self.shape),
            "data_offsets": [self.start, self.end],
        }

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> TensorEntry:
        """The inverse of `told`; raises `ValueError`, `TypeError` or `LookupError` for an invalid entry."""
        dtype = _TORCH[told["dtype"]]
        shape, (start, end) = tuple(told["shape"]), told["data_offsets"]
        count = dtype.itemsize
        for number in (*shape, start, end):
            if type(number) is not int or not 0 <= number < 2**53:
                raise ValueError(f"{number!r} is no size")
        for length in shape:
            count *= length
        if end - start != count:
            raise ValueError(f"{list(shape)} of {told['dtype']} are not {end - start} bytes")
        return cls(dtype, shape, start, end)


class Group(NamedTuple):
    """Tensors that are verified together, in the order of the file."""

    name: str
    tensors: Mapping[str, TensorEntry]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The byte ranges of the group, adjacent ones joined."""
        return joined((entry.start, entry.end) for entry in self.tensors.values())

    @property
    def size(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.end - entry.start for entry in self.tensors.values())


def group_of(tensor: str) -> str:
    """The group a tensor belongs to, by its name: ``kv/0/k``, `PATCH`, `EMBEDS` or `HEAD`."""
    kind = tensor.partition("/")[0]
    if kind == "kv":
        return "/".join(tensor.split("/")[:3])
    return kind if kind in (PATCH, EMBEDS) else HEAD


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


def grouped(entries: Mapping[str, TensorEntry]) -> dict[str, Group]:
    """The groups of an object, in the file order of their first tensors."""
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        found.setdefault(group_of(name), {})[name] = entry
    return {name: Group(name, tensors) for name, tensors in found.items()}


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """``spans`` in order, adjacent ones joined, empty ones left out."""
    made: list[tuple[int, int]] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if made and made[-1][1] == start:
            made[-1] = (made[-1][0], end)
        else:
            made.append((start, end))
    return made
