"""The clock of a job: wall time, read after synchronisation with the device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kamera.compile.tasks import Cost


class Clock:
    """Wall time of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Seconds since an arbitrary moment, read after the work launched on the GPU has ended."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextmanager
    def adding(self, cost: Cost, field: str) -> Iterator[None]:
        """Add the seconds of the block to a field of ``cost``; nothing if the block raises."""
        started = self.now()
        yield
        setattr(cost, field, getattr(cost, field) + self.now() - started)

    @property
    def name(self) -> str:
        """Name of the clock, for a report."""
        return "wall time" if self._device.type == "cpu" else f"wall time, {self._device.type} waited for"
