"""Lists among named tensors: entry 2 of the list ``features`` is the tensor ``features.2``.

Records and files hold tensors by name, and a mapping that was read gives its names in any order. A list is
put together by its numbers, and here alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

_ENTRY = re.compile(r"(.+)\.([0-9]+)")


def flat_lists(values: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """``values`` as tensors by name alone: an entry of a list is ``name.number``, counted from 0."""
    flat: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        entries = {name: value} if isinstance(value, torch.Tensor) else _entries(name, value)
        flat.update(entries)
    return flat


def whole_lists(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | list[torch.Tensor]]:
    """The values of `flat_lists`, in whatever order ``tensors`` gives its names.

    Raises ValueError for a list that lacks an entry, holds one twice, or has the name of a tensor.
    """
    lists: dict[str, list[torch.Tensor]] = {}
    single = {name: tensor for name, tensor in tensors.items() if _list_of(name)[1] is None}
    for name in name_order(tensors.keys() - single.keys()):
        of, number = _list_of(name)
        entries = lists.setdefault(of, [])
        if number != len(entries) or of in single:
            raise ValueError(f"{name} is out of place: a list has the entries {of}.0, {of}.1, … without gaps")
        entries.append(tensors[name])
    return single | lists


def name_order(names: Iterable[str]) -> list[str]:
    """``names`` sorted, the entries of a list by their number: 2 stands before 10."""
    return [
        name
        for *_, name in sorted((of, number or 0, name) for name in names for of, number in [_list_of(name)])
    ]


def _entries(name: str, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}.{number}": tensor for number, tensor in enumerate(values)}


def _list_of(name: str) -> tuple[str, int | None]:
    """The list that a tensor is an entry of, and its number; its own name and None for any other."""
    entry = _ENTRY.fullmatch(name)
    return (name, None) if entry is None else (entry[1], int(entry[2]))
