"""A cheap witness of changes in a model: it runs before every operation, so it must cost almost nothing."""

from __future__ import annotations

import hashlib
import json
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from kamera.engines.hf.computation import (
    bound_buffer,
    chooses_frequencies,
    computation,
    frequencies,
    layers_path,
    watched,
)
from kamera.engines.hf.hooks import hook_tables, is_foreign

_SWITCHES = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")

_PARTS = ("_modules", "_parameters", "_buffers")
_state = attrgetter("__dict__")
_version = attrgetter("_version")

_SAMPLED, _WHOLE = 8, 64
"""Elements read of a tensor; a tensor of no more than ``_WHOLE`` is read whole."""

_UNCOUNTED = 4096
"""`_WHOLE` for a tensor made in inference mode, whose writes no counter counts."""


class Seen(NamedTuple):
    """The result of a look. Two are equal if nothing changed between them."""

    tensors: tuple[Any, ...]
    settings: str
    hooks: tuple[int, ...]  # foreign ones, by identity
    vision: str  # settings without those of the decoder's layers

    @property
    def computation(self) -> tuple[Any, ...]:
        """All but the identities of the hooks."""
        return self.tensors, self.settings


class Witness:
    """Tells by `look` if the model's computation may have changed since the last look.

    A look differs when a module, parameter or buffer was replaced, added or removed (adapter loaded,
    weights swapped), when a tensor was written in place or given other storage, when an adapter was
    activated, disabled or merged, when a setting of a module or config was changed, and when a hook
    came or went. A write shows in the tensor's counter or in a sample of its content, since no counter
    sees the writes of fused optimizers, to ``tensor.data``, or to tensors made in inference mode. A write
    that no counter counts and that misses the sample is not seen.

    Walking a module tree in Python takes a millisecond for a thousand tensors. So the walk is done
    once and kept as flat lists; a look goes over those in C, and walks again when anything in the tree
    has changed. The tensors are held, so that no new one can take an old one's address unseen.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        self._model = model
        self._decoder = decoder
        self._walks = 0
        self._walk()
        self._note()

    def look(self) -> Seen:
        """The model's present state; equal to the last look if nothing changed."""
        if not self._is_as_walked():
            self._walk()
            self._note()
        elif not self._is_as_noted():
            self._note()
        addresses = tuple(map(torch.Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:
            self._sample(addresses)
        counted = tuple(map(_version, self._versioned))
        switches = tuple(map(_switches, self._adapters))
        chosen = tuple(map(tuple, map(frequencies, self._choosing)))
        content = tuple(map(_read, self._samples))
        hooks = tuple(map(id, self._foreign))
        tensors = (self._walks, addresses, counted, switches, chosen, content)
        return Seen(tensors, self._settings, hooks, self._vision)

    # -- modules and tensors -------------------------------------------------------------------

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
        owners = {
            id(part): m
            for parts in self._parts.values()
            for part, m in zip(parts, self._modules, strict=True)
        }
        self._bound = [bound_buffer(owners[id(part)], name) for part in self._filled for name in part]
        self._held = self._values()
        self._tensors = [t for t in self._held if isinstance(t, torch.Tensor)]
        self._versioned = [t for t in self._tensors if not t.is_inference()]  # the others keep no count
        self._adapters = _adapters(self._modules)
        self._choosing = [m for m in self._modules if chooses_frequencies(m)]
        self._tables = hook_tables(self._modules)
        self._sample(tuple(map(torch.Tensor.data_ptr, self._tensors)))

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
        """Children, parameters and buffers of all modules, but the frequencies that forwards choose."""
        return list(compress(chain.from_iterable(map(dict.values, self._filled)), self._bound))

    def _sample(self, addresses: tuple[int, ...]) -> None:
        """Prepare to read a few elements of every tensor: views, gathered by one call for each kind."""
        self._addresses = addresses
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in self._tensors:
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                continue  # packed in a way of its own
            if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
                continue
            kinds.setdefault((tensor.device, tensor.dtype), []).append(_few(tensor.detach()))
        self._samples = list(kinds.values())

    # -- settings ------------------------------------------------------------------------------

    def _note(self) -> None:
        """Record the present settings and hooks; equal settings give an equal digest."""
        places, self._lists = watched(self._model)
        self._places = [place for place, _ in places]
        self._counts = list(map(len, self._places))
        self._told = [name not in out for place, out in places for name in place]
        self._said = self._sayings()
        self._copies = [list(values) for values in self._lists]
        self._hung = self._hooks()
        self._foreign = [hook for hook in self._hung if is_foreign(hook)]
        whole, vision = hashlib.blake2b(digest_size=32), hashlib.blake2b(digest_size=32)
        layers = layers_path(self._model, self._decoder)
        for line in computation(self._model):
            said = json.dumps(line, sort_keys=True).encode() + b"\n"
            whole.update(said)
            if not line[0].startswith(layers):
                vision.update(said)
        self._settings, self._vision = whole.hexdigest(), vision.hexdigest()

    def _is_as_noted(self) -> bool:
        return (
            list(map(len, self._places)) == self._counts
            and _same(self._sayings(), self._said)
            and self._lists == self._copies
            and _alike(self._hooks(), self._hung)
        )

    def _sayings(self) -> list[Any]:
        return list(compress(chain.from_iterable(map(dict.values, self._places)), self._told))

    def _hooks(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._tables)))


def adapter_state(modules: list[nn.Module]) -> tuple[str, ...]:
    """The active adapters, layer by layer: PEFT switches and merges them without a new tensor."""
    return tuple(map(_switches, _adapters(modules)))


def _adapters(modules: list[nn.Module]) -> list[nn.Module]:
    return [m for m in modules if hasattr(type(m), "active_adapters")]


def _switches(module: nn.Module) -> str:
    if not isinstance(module.active_adapters, list):  # a whole model's own is a method
        return ""
    return repr([getattr(module, name, None) for name in _SWITCHES])


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """A view ``[elements]`` of a few of a tensor's elements, along a diagonal from the first one on."""
    size = tensor.numel()
    if size <= (_UNCOUNTED if tensor.is_inference() else _WHOLE) and tensor.is_contiguous():
        return tensor.reshape(-1)
    count = min(_SAMPLED, max(tensor.shape))
    step = sum(
        (length // count) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.as_strided((count,), (step,), tensor.storage_offset())


def _read(views: list[torch.Tensor]) -> bytes:
    # on an accelerator this is one small kernel and one small copy
    with torch.no_grad():
        return bytes(torch.cat(views).view(torch.uint8).cpu().numpy().data)


def _same(now: Any, before: list[Any]) -> bool:
    return all(map(is_, now, before))


def _alike(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and _same(now, before)
