"""Hooks that act in the thread that made them, and do not count as part of a model's computation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from kamera.engines.hf.hooks import OwnHook


class ThreadHook(OwnHook):
    """A hook of Kamera's own that acts in the thread that made it, and in no other."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(call)
        self._thread = threading.get_ident()

    def __call__(self, *given: Any) -> Any:
        return self._call(*given) if threading.get_ident() == self._thread else None


def on_entry(module: nn.Module, call: Callable[..., Any]) -> RemovableHandle:
    """``call(module, args, kwargs)`` before the forwards of ``module`` in this thread."""
    return module.register_forward_pre_hook(ThreadHook(call), with_kwargs=True)
