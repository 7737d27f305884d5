"""Forward hooks, divided into those that are part of a model's computation and those that are not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as globally
from torch.utils.hooks import RemovableHandle

_LIBRARIES = ("transformers.utils.output_capturing", "accelerate.")
"""Libraries whose hooks return outputs or move tensors between devices: they change no number."""


class Observer:
    """A forward hook that only observes: the return value of ``call`` is dropped.

    Any other hook belongs to the model's computation, so that adding one changes the fingerprint of its
    backbone. Register an observer to count or to time without that. A copied or pickled model keeps an
    observer that does nothing in its place.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *given: Any) -> Any:
        self._call(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        return Observer, (_nothing,)


class ThreadHook(Observer):
    """A hook of Kamera's own that acts in the thread that made it, and in no other."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(call)
        self._thread = threading.get_ident()

    def __call__(self, *given: Any) -> Any:
        return self._call(*given) if threading.get_ident() == self._thread else None


@contextmanager
def hooked(*handles: RemovableHandle) -> Iterator[None]:
    """Remove the hooks after the block."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def on_entry(module: nn.Module, call: Callable[..., Any]) -> RemovableHandle:
    """``call(module, args, kwargs)`` before the forwards of ``module`` in this thread."""
    return module.register_forward_pre_hook(ThreadHook(call), with_kwargs=True)


def is_foreign(hook: Any) -> bool:
    """True if a hook may change the model's computation."""
    return not (isinstance(hook, Observer) or str(getattr(hook, "__module__", "")).startswith(_LIBRARIES))


def hook_tables(modules: list[nn.Module]) -> list[dict[int, Any]]:
    """The tables of forward hooks of ``modules``, and those of hooks on every module."""
    own = [table for m in modules for table in (m._forward_pre_hooks, m._forward_hooks)]
    return [globally._global_forward_pre_hooks, globally._global_forward_hooks, *own]


def _nothing(*_: Any) -> None:
    pass
