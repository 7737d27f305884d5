"""A cheap witness of changes in a model: it runs before every operation, so it must cost almost nothing."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kamera.engines.hf.computation import (
    Computation,
    binds_buffer,
    chooses_frequencies,
    computation,
    frequencies,
    layers_path,
)
from kamera.engines.hf.hooks import hook_tables, is_foreign
from kamera.engines.hf.state import parts_of
from kamera.engines.hf.watch import Watch

_PARTS = ("_modules", "_parameters", "_buffers")
_parts = itemgetter(*_PARTS)
_state = attrgetter("__dict__")
_version = attrgetter("_version")

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SAMPLED, _WHOLE = 8, 64
"""Elements read of a tensor; a tensor of no more than ``_WHOLE`` is read whole."""

_UNCOUNTED = 4096
"""`_WHOLE` for a tensor made in inference mode, whose writes no counter counts."""


class Look(NamedTuple):
    """The result of a look. Two are equal if nothing changed between them."""

    tensors: tuple[Any, ...]
    settings: tuple[str, str]  # of the whole, and without the decoder's layers
    hooks: tuple[int, ...]  # foreign ones, by identity


class Witness:
    """Tells by `look` if the model's computation may have changed since the last look.

    A look differs when a module, parameter or buffer was replaced, added or removed (adapter loaded,
    weights swapped), when a tensor was written in place or given other storage, when an adapter was
    activated, disabled or merged, when a setting of a module or config was changed, when a hook
    came or went, when a function that the model's code uses was replaced, or its code, defaults or closure,
    and when anything was that hooks, functions and objects hold. A write shows in the tensor's counter or in
    a sample of its content, since no counter sees the writes of fused optimizers, to ``tensor.data``, or to
    tensors made in inference mode. A write that no counter counts and that misses the sample is not seen.

    Walking a module tree in Python takes a millisecond for a thousand tensors. So the walk is done
    once and kept as flat lists; a look goes over those in C, and walks again when anything in the tree
    has changed. The tensors are held, so that no new one can take an old one's address unseen.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        self._model = model
        self._decoder = decoder
        self._walks = 0
        self._nonce = secrets.token_hex(16)
        self._walk()
        self._note()

    def look(self) -> Look:
        """The model's present state; equal to the last look if nothing changed."""
        if not self._is_as_walked():
            self._walk()
            self._note()
        elif not self._is_as_noted():
            self._note()
        chosen_frequencies = tuple(map(tuple, map(frequencies, self._choosers)))
        hooks = tuple(map(id, self._foreign))
        tensors = (self._walks, self._samples.read(), chosen_frequencies)
        return Look(tensors, self._settings, hooks)

    # -- modules and tensors -------------------------------------------------------------------

    def _walk(self) -> None:
        self._walks += 1
        self._modules = list(self._model.modules())
        self._types = list(map(type, self._modules))
        self._states = list(map(_state, self._modules))
        self._parts = list(chain.from_iterable(map(_parts, self._states)))
        self._tree = Watch()
        for module, state in zip(self._modules, self._states, strict=True):
            for part in _parts(state):  # but the frequencies that forwards choose
                self._tree.watch_space(part, frozenset(n for n in part if not binds_buffer(module, n)))
        self._tree.note()
        self._samples = _Samples(t for t in self._tree.inside if isinstance(t, torch.Tensor))
        self._choosers = [m for m in self._modules if chooses_frequencies(m)]
        self._tables = hook_tables(self._modules)

    def _is_as_walked(self) -> bool:
        return (
            _same(map(type, self._modules), self._types)
            and _same(map(_state, self._modules), self._states)
            and _same(chain.from_iterable(map(_parts, self._states)), self._parts)
            and self._tree.is_as_noted()
        )

    # -- settings ------------------------------------------------------------------------------

    def _note(self) -> None:
        """Record the present settings, code and hooks; equal ones give an equal digest."""
        self.computation = computation(self._model)
        watch = self.computation.watch
        watch.note()
        self._tensors = _Samples(watch.tensors.values())
        self._tensor_state = self._tensors.read()
        self._noted_hooks, self._foreign = self._hooks(), self._foreign_hooks()
        vision = computation(self._model, layers_path(self._model, self._decoder))
        self._settings = (self._digest(self.computation), self._digest(vision))

    def _digest(self, record: Computation) -> str:
        hasher = hashlib.blake2b(digest_size=32)
        for line in record.lines:
            hasher.update(json.dumps(line, sort_keys=True).encode() + b"\n")
        if record.unread:  # nobody else's is known to be equal, a forked child's included
            hasher.update(f"{self._nonce} {os.getpid()}".encode())
        return hasher.hexdigest()

    def _is_as_noted(self) -> bool:
        hooks = self._hooks()
        if not _alike(hooks, self._noted_hooks):
            if not _alike(self._foreign_hooks(), self._foreign):
                return False
            self._noted_hooks = hooks
        return self.computation.watch.is_as_noted() and self._tensors.read() == self._tensor_state

    def _hooks(self) -> list[Any]:
        return [*map(len, self._tables), *chain.from_iterable(map(dict.values, self._tables))]

    def _foreign_hooks(self) -> list[Any]:
        """Hooks that may change what is computed, each behind the table it hangs in: a moved one shows."""
        pairs = ((table, hook) for table in filter(None, self._tables) for hook in list(table.values()))
        return [one for pair in pairs if is_foreign(pair[1]) for one in pair]


class _Samples:
    """Tensors whose writes and exchanges show in `read`: by address, count of writes, and a few elements."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [part for t in tensors for part in parts_of(t)]
        self._counted_tensors = [t for t in self._tensors if not t.is_inference()]  # the others keep no count
        self._addresses: tuple[int, ...] | None = None
        self._views: list[list[torch.Tensor]] = []
        self._arrays: list[list[np.ndarray]] = []  # NumPy gathers small pieces in a seventh of torch's time

    def read(self) -> tuple[Any, ...]:
        """Equal to the last one if no write was seen."""
        addresses = tuple(map(torch.Tensor.data_ptr, self._tensors))
        if addresses != self._addresses:
            self._view(addresses)
        content = (*map(_join, self._arrays), *map(_read, self._views))
        return addresses, tuple(map(_version, self._counted_tensors)), content

    def _view(self, addresses: tuple[int, ...]) -> None:
        """Prepare to read a few elements of every tensor: views, gathered by one call for each kind."""
        self._addresses = addresses
        kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        arrays: dict[int, list[np.ndarray]] = {}
        for tensor in self._tensors:
            if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_quantized:
                continue  # packed in a way of its own
            if tensor.is_meta or tensor.layout is not torch.strided or tensor.numel() == 0:
                continue
            few, bits = _few(tensor.detach()), _BITS.get(tensor.itemsize)
            if bits is None or few.device.type != "cpu" or few.is_conj() or few.is_neg():
                kinds.setdefault((tensor.device, tensor.dtype), []).append(few)
            else:  # `Tensor.numpy` would forbid the model to resize the storage
                arrays.setdefault(tensor.itemsize, []).append(np.from_dlpack(few.view(bits)))
        self._views, self._arrays = list(kinds.values()), list(arrays.values())


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


def _join(arrays: list[np.ndarray]) -> bytes:
    return np.concatenate(arrays).tobytes()


def _same(new: Any, old: list[Any]) -> bool:
    return all(map(is_, new, old))


def _alike(new: list[Any], old: list[Any]) -> bool:
    return len(new) == len(old) and _same(new, old)
