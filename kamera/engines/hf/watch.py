"""What a look compares, kept as flat lists: places and the objects in them, and the tensors they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, compress
from operator import attrgetter, is_, methodcaller
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch

_ABSENT = object()
_EMPTY = "nothing"
_function = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_values, _bytes = methodcaller("values"), methodcaller("tobytes")
_cell = attrgetter("cell_contents")

_WHOLE = 4096
"""Elements of an array that are compared at every look; of a larger one as many, evenly spread."""


class Watch:
    """Places whose objects are compared by identity, and arrays whose content is.

    Filled by `kamera.engines.hf.state.Reader`. `note` records what is there, `is_as_noted` tells if it still
    is, in C: it is asked before every operation. ``tensors`` are left to the caller. Everything compared is
    held, so no new object takes an old one's address.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self._spaces: dict[int, tuple[Mapping[Any, Any], frozenset[str]]] = {}
        self._groups: dict[int, Iterable[Any]] = {}
        self._places: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self._slots: dict[int, tuple[Any, tuple[str, ...]]] = {}
        self._functions: dict[int, FunctionType] = {}
        self._cells: dict[int, CellType] = {}
        self._arrays: dict[int, np.ndarray] = {}
        self.note()

    def watch_space(self, space: Mapping[Any, Any], left_out: frozenset[str] = frozenset()) -> None:
        """Watch all names of a namespace or dict but those in ``left_out``."""
        self._spaces.setdefault(id(space), (space, left_out))

    def watch_name(self, space: Mapping[str, Any], name: str) -> None:
        """Watch one name of a namespace."""
        self._places.setdefault((id(space), name), (space, name))

    def watch_group(self, group: Iterable[Any]) -> None:
        """Watch the members of a list, set or deque."""
        self._groups.setdefault(id(group), group)

    def watch_slots(self, holder: Any, names: tuple[str, ...]) -> None:
        """Watch attributes that are in no namespace."""
        self._slots.setdefault(id(holder), (holder, names))

    def watch_function(self, function: FunctionType) -> None:
        """Watch code, defaults and closure of a function."""
        self._functions.setdefault(id(function), function)
        for cell in function.__closure__ or ():
            self._cells.setdefault(id(cell), cell)

    def watch_array(self, array: np.ndarray) -> None:
        """Watch the content of an array."""
        self._arrays.setdefault(id(array), array)

    def note(self) -> None:
        """Record what is in all places now."""
        spaces = list(self._spaces.values())
        self._noted_spaces = [space for space, _ in spaces]
        self._noted_places = list(self._places.values())
        self._attributes = [(holder, name) for holder, names in self._slots.values() for name in names]
        self._filled_cells = [cell for cell in self._cells.values() if _is_filled(cell)]
        self._empty_cells = [cell for cell in self._cells.values() if not _is_filled(cell)]
        self._noted_groups = list(self._groups.values())
        self._whole_arrays = [_few(a) for a in self._arrays.values() if a.flags.c_contiguous]
        self._spread_arrays = [a for a in self._arrays.values() if not a.flags.c_contiguous]
        self._counts = list(map(len, self._noted_spaces))
        self._name_mask = [name not in out for space, out in spaces for name in space]
        self.inside = self._values()
        self._objects = self._look()
        self._sizes = list(map(len, map(list, self._noted_groups)))
        self._members = list(chain.from_iterable(self._noted_groups))
        self._array_bytes = self._contents()

    def is_as_noted(self) -> bool:
        """True if every place has the object that was noted, and every array its content."""
        return (
            list(map(len, self._noted_spaces)) == self._counts
            and _same(self._values(), self.inside)
            and _same(self._look(), self._objects)
            and list(map(len, map(list, self._noted_groups))) == self._sizes
            and _same(list(chain.from_iterable(self._noted_groups)), self._members)
            and self._contents() == self._array_bytes
        )

    def _values(self) -> list[Any]:
        return list(compress(chain.from_iterable(map(_values, self._noted_spaces)), self._name_mask))

    def _look(self) -> list[Any]:
        objects: list[Any] = [space.get(name, _ABSENT) for space, name in self._noted_places]
        objects.extend(chain.from_iterable(map(_function, self._functions.values())))
        try:
            objects.extend(map(_cell, self._filled_cells))
        except ValueError:
            return []  # one was emptied
        objects.extend(map(content_of_cell, self._empty_cells))
        objects.extend([getattr(holder, name, _ABSENT) for holder, name in self._attributes])
        return objects

    def _contents(self) -> list[bytes]:
        return [*map(_bytes, self._whole_arrays), *map(_bytes, map(_few, self._spread_arrays))]


def content_of_cell(cell: CellType) -> Any:
    """What a closure holds in ``cell``; a text for nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _is_filled(cell: CellType) -> bool:
    return content_of_cell(cell) is not _EMPTY


def _few(array: np.ndarray) -> np.ndarray:
    """The elements that are compared: a view, of a contiguous array."""
    flat = array.reshape(-1) if array.flags.c_contiguous else array.flat[:]
    return flat[:: max(1, flat.size // _WHOLE)]


def _same(new: list[Any], old: list[Any]) -> bool:
    return len(new) == len(old) and all(map(is_, new, old))
