"""What a worker is asked to do, and what it answers: ids, counts and descriptions, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from kamera.compile.ordering import Path
from kamera.compile.plan import ChunkSource


@dataclass(eq=False)
class Cost:
    """Work done: counts by hooks on the model, seconds where it was waited for.

    ``decoder_seconds`` are those inside the decoder, ``seconds`` all of the task's.
    """

    forwards: int = 0
    tokens: int = 0
    vision_encodes: int = 0
    seconds: float = 0.0
    decoder_seconds: float = 0.0

    def add(self, other: Cost) -> None:
        """Count ``other`` too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Sources:
    """A task: canonicals of these chunks under one system prompt."""

    system: str | None
    sources: tuple[ChunkSource, ...]


@dataclass(frozen=True)
class Found:
    """One chunk of `Sources`: its id and tokens, and whether it was formed now; or why it cannot be."""

    source: ChunkSource
    chunk_id: str = ""
    tokens: int = 0
    formed: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Branch:
    """A window to compile: path ``index`` of a walk, its chunk ids, and where each is from.

    The chunks before ``first`` belong to another branch: they are prefilled, and no more is owed.
    Orbit patches are owed for those in ``orbits``.
    """

    system: str | None
    index: int
    path: Path
    sources: tuple[ChunkSource, ...]
    first: int
    orbits: frozenset[int]


@dataclass(frozen=True)
class Grown:
    """One `Branch`: for which of its chunks a patch and an orbit patch was formed now.

    ``failed`` is the first chunk that could not be done, ``error`` why; those behind it are not done.
    """

    patches: frozenset[int]
    orbits: frozenset[int]
    failed: int | None = None
    error: str = ""


@dataclass(frozen=True)
class Located:
    """Found of every source of a task, in order, and what it cost."""

    found: tuple[Found, ...]
    cost: Cost


@dataclass(frozen=True)
class Compiled:
    """Grown of every branch of a task, in order, and what it cost."""

    grown: tuple[Grown, ...]
    cost: Cost
