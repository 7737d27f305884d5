"""Settings of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kamera.compile.plan import PlannedWindow
from kamera.ops import PatchBudget, layers_of
from kamera.trust import ReusePolicy


@dataclass(frozen=True)
class Settings:
    """Defaults for the lines of a plan: patches within ``rank``, ``patch_bytes`` and ``layers`` (as in
    `ReusePolicy`); with ``orbit`` also one per antecedent set.

    A patch that would leave out more than ``max_error`` (as in `ReusePolicy`) is formed larger.

    ``samples`` and ``seed`` select the orderings that an orbit patch averages (`patches.orderings`);
    ``limit`` compiles the first lines only.
    """

    rank: int = ReusePolicy.rank
    patch_bytes: float | None = ReusePolicy.patch_bytes
    layers: Sequence[int] | str | None = None
    orbit: bool = False
    samples: int | None = None
    seed: int = 0
    limit: int | None = None
    max_error: float | None = ReusePolicy.max_error

    def __post_init__(self) -> None:
        for name in ("rank", "samples", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        object.__setattr__(self, "layers", layers_of(self.layers))
        if self.max_error is not None and not 0.0 <= self.max_error <= 1.0:
            raise ValueError(f"max_error {self.max_error} must lie between 0.0 and 1.0")
        _ = self.budget  # raises for an invalid budget

    @property
    def budget(self) -> PatchBudget:
        """Budget of a patch."""
        return PatchBudget(self.rank, self.patch_bytes, layers_of(self.layers))

    def budget_of(self, line: PlannedWindow) -> PatchBudget:
        """Budget of a patch of this line."""
        rank = self.rank if line.rank is None else line.rank
        layers = self.layers if line.layers is None else line.layers
        return PatchBudget(rank, self.patch_bytes, layers_of(layers))

    def orbit_of(self, line: PlannedWindow) -> bool:
        """True if orbit patches are formed for this line."""
        return self.orbit if line.orbit is None else line.orbit
