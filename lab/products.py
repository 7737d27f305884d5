"""bfloat16 products on processors that have no instructions for them.

There PyTorch takes a path that is up to fifteen times as slow as float32. Accelerators multiply bfloat16
exactly, sum in float32 and round once; `WideSums` does the same on the CPU with the float32 path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class WideSums(TorchFunctionMode):
    """While it is entered, linear layers of bfloat16 on the CPU sum in float32 and round their output."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.linear or not _narrow(args[0]):
            return func(*args, **kwargs)
        wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        named = {name: arg.float() if isinstance(arg, torch.Tensor) else arg for name, arg in kwargs.items()}
        return functional.linear(*wide, **named).to(torch.bfloat16)


def _narrow(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 and x.device.type == "cpu"
