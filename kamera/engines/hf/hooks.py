"""Forward hooks, divided into those that are part of a model's computation and those that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as globally

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


def is_foreign(hook: Any) -> bool:
    """True if a hook may change the model's computation."""
    return not (isinstance(hook, Observer) or str(getattr(hook, "__module__", "")).startswith(_LIBRARIES))


def hook_tables(modules: list[nn.Module]) -> list[dict[int, Any]]:
    """The tables of forward hooks of ``modules``, and those of hooks on every module."""
    own = [table for m in modules for table in (m._forward_pre_hooks, m._forward_hooks)]
    return [globally._global_forward_pre_hooks, globally._global_forward_hooks, *own]


def _nothing(*_: Any) -> None:
    pass
