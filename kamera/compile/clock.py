"""The clock of a job: wall time, read after synchronisation with the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from kamera.compile.tasks import TaskCost
from kamera.engines.hf import Observer


class Clock:
    """Wall time of one device; ``name`` is for a report."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = "wall time" if device.type == "cpu" else f"wall time, {device.type} waited for"

    def now(self) -> float:
        """Seconds since an arbitrary moment, read after the work launched on the GPU has ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def adding(self, cost: TaskCost, field: str) -> Iterator[None]:
        """Add the seconds of the block to a field of ``cost``; nothing if the block raises."""
        started = self.now()
        yield
        setattr(cost, field, getattr(cost, field) + self.now() - started)

    @contextmanager
    def inside(self, decoder: nn.Module, cost: TaskCost) -> Iterator[None]:
        """Add the seconds that a decoder runs within the block to ``cost``."""
        started = 0.0

        def begin(*_: object) -> None:
            nonlocal started
            started = self.now()

        def end(*_: object) -> None:
            cost.decoder_seconds += self.now() - started

        hooks = [
            decoder.register_forward_pre_hook(Observer(begin)),
            decoder.register_forward_hook(Observer(end)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
