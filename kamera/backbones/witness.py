"""A cheap witness of a model's weights: taken before every operation, so it has to cost next to nothing."""

from __future__ import annotations

from itertools import chain, compress
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

_SWITCHES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")

_PARTS = ("_modules", "_parameters", "_buffers")
_state = attrgetter("__dict__")
_version = attrgetter("_version")


class Witness:
    """Says by `state` whether the weights may have changed since it was last asked.

    It differs when a module, parameter or buffer was replaced, added or removed (adapter loaded,
    weights swapped), when a tensor was written in place or given other storage, and when an adapter
    was activated, disabled or merged. A write of your own through ``tensor.data`` leaves no trace:
    build a new Backbone after one. Rotary buffers (``inv_freq``) are left out: some models rewrite
    theirs at every forward, and the layout binds them.

    Walking a module tree in Python takes a millisecond for a thousand tensors. So the walk is done
    once and kept as flat lists; a look goes over those in C, and walks again when anything in the tree
    is not what it was. The tensors are held, so that no new one can take an old one's address unseen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._walks = 0
        self._walk()

    def state(self) -> tuple[Any, ...]:
        """Equal to the last one if nothing changed."""
        if not self._is_as_walked():
            self._walk()
        switches = tuple(map(_switches, self._adapters))
        addresses = tuple(map(torch.Tensor.data_ptr, self._tensors))
        return self._walks, addresses, tuple(map(_version, self._versioned)), switches

    def _walk(self) -> None:
        self._walks += 1
        self._modules = list(self._model.modules())
        self._types = list(map(type, self._modules))
        self._states = list(map(_state, self._modules))
        self._parts = {name: list(map(itemgetter(name), self._states)) for name in _PARTS}
        held: list[dict[str, Any]] = list(chain.from_iterable(self._parts.values()))
        self._empty = [part for part in held if not part]
        self._filled = [part for part in held if part]
        self._sizes = list(map(len, self._filled))
        self._bound = [not name.endswith("inv_freq") for part in self._filled for name in part]
        self._held = self._values()
        self._tensors = [t for t in self._held if isinstance(t, torch.Tensor)]
        self._versioned = [t for t in self._tensors if not t.is_inference()]  # the others keep no count
        self._adapters = _adapters(self._modules)

    def _is_as_walked(self) -> bool:
        return (
            _same(map(type, self._modules), self._types)
            and _same(map(_state, self._modules), self._states)
            and all(_same(map(itemgetter(name), self._states), self._parts[name]) for name in _PARTS)
            and not any(self._empty)
            and list(map(len, self._filled)) == self._sizes  # before values are paired
            and _same(self._values(), self._held)
        )

    def _values(self) -> list[Any]:
        """Children, parameters and buffers of all modules but the rotary ones."""
        return list(compress(chain.from_iterable(map(dict.values, self._filled)), self._bound))


def adapter_state(model: nn.Module) -> tuple[str, ...]:
    """Which adapters act, layer by layer: PEFT switches and merges them without a new tensor."""
    return tuple(map(_switches, _adapters(list(model.modules()))))


def _adapters(modules: list[nn.Module]) -> list[nn.Module]:
    return [m for m in modules if hasattr(type(m), "active_adapters")]


def _switches(module: nn.Module) -> str:
    if not isinstance(module.active_adapters, list):  # a whole model's own is a method
        return ""
    return repr([getattr(module, name, None) for name in _SWITCHES])


def _same(now: Any, before: list[Any]) -> bool:
    return all(map(is_, now, before))
