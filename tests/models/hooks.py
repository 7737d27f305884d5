"""Hooks of tests: plain ones, which begin to act once a backbone has tried them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.hooks import RemovableHandle


def add_hooks(
    backbone: Any, *hooks: tuple[Callable[..., RemovableHandle], Callable[..., Any]], **options: Any
) -> list[RemovableHandle]:
    """Register hooks, each given as ``(module.register_…, call)``; the forward that tries them calls none."""
    armed: list[bool] = []

    def acting(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: call(*given) if armed else None

    handles = [register(acting(call), **options) for register, call in hooks]
    backbone.engine.checked_fingerprint()
    armed.append(True)
    return handles


@contextmanager
def hooked(
    backbone: Any, *hooks: tuple[Callable[..., RemovableHandle], Callable[..., Any]], **options: Any
) -> Iterator[None]:
    """Context of hooks, as by `add_hooks`."""
    handles = add_hooks(backbone, *hooks, **options)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
