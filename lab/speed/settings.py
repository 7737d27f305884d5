"""What a benchmark is asked to do, and what every benchmark module offers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch

from kamera.engines.hf import HfEngine
from lab.speed.shape import Preset

Name = Literal["apply", "kernel", "serve", "window", "growth", "store", "compile"]
"""Each one is a module ``lab.speed.<name>`` with ``run(settings, step) -> Result``."""

NAMES: tuple[Name, ...] = get_args(Name)

Step = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


def unwatched(done: int, total: int) -> None:
    """Nobody looks at the progress."""


@dataclass(frozen=True)
class Settings:
    """One run.

    ``layers`` cuts the depth of decoder and vision tower (None: all of them); ``lengths`` are tokens of
    a chunk; ``chunks`` how many stand in a window, ``stored`` how many in a store. Arms take turns for
    at least ``min_rounds`` rounds, at most ``rounds``, and stop between when ``seconds`` are over.
    ``same_weights`` gives every layer the weights of the first of its shape (`Preset.build`).
    """

    preset: str
    layers: int | None = None
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    chunks: tuple[int, ...] = (4, 8, 16, 32, 64)
    stored: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16
    threads: int = 1
    rounds: int = 20
    min_rounds: int = 3
    seconds: float = 20.0
    same_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("lengths", "chunks", "stored"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: give at least one number of at least 1")
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"layers {self.layers} must be at least 1")
        if not 1 <= self.min_rounds <= self.rounds:
            raise ValueError(f"{self.min_rounds}..{self.rounds} rounds: at least 1, the most last")
        if self.threads < 1:
            raise ValueError(f"threads {self.threads} must be at least 1")

    def build(self, shape: Preset) -> HfEngine:
        """The model that is asked for."""
        return shape.build(self.layers, dtype=self.dtype, device=self.device, same_weights=self.same_weights)

    def command(self, name: str) -> str:
        """The line that measures ``name`` under these settings; what is at its default is left out."""
        words = ["python", "-m", "lab.speed", name]
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, tuple):
                value = ",".join(map(str, value))
            words += ["--" + field.name.replace("_", "-")]
            words += [] if value is True else [str(value).removeprefix("torch.")]
        return shlex.join(words)

    def to_info(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "dtype": str(self.dtype).removeprefix("torch.")}
