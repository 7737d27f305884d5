"""What a job forms."""

from __future__ import annotations

from dataclasses import dataclass

from kamera.ops import PatchBudget
from kamera.window import ReusePolicy


@dataclass(frozen=True)
class Settings:
    """What to form: patches within ``rank`` and ``patch_bytes`` (as in `ReusePolicy`); with ``orbit``
    also one per antecedent set.

    ``samples`` orderings are averaged for more than four antecedents, drawn from ``seed``; ``limit``
    compiles the first lines only.
    """

    rank: int = ReusePolicy.rank
    patch_bytes: float | None = ReusePolicy.patch_bytes
    orbit: bool = False
    samples: int = 24
    seed: int = 0
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "samples", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        _ = self.budget  # it refuses what is no budget

    @property
    def budget(self) -> PatchBudget:
        """How large a patch may be."""
        return PatchBudget(self.rank, self.patch_bytes)
