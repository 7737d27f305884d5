"""Tasks of workers and their results: ids, counts and descriptions, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kamera.compile.plan import ChunkSource
from kamera.compile.trie import Path
from kamera.ops import PatchBudget


@dataclass(eq=False)
class TaskCost:
    """Work done: counts by hooks on the model, and wall time.

    ``forwards``, ``tokens`` and ``vision_encodes`` are the work on the task's objects; ``probe_forwards``,
    ``probe_tokens`` and ``probe_encodes`` are that of the model's probe, which comes on top.

    ``bytes`` are those of the canonicals and patches that were formed, as stored. ``refused`` stored objects
    were not taken.
    """

    forwards: int = 0
    tokens: int = 0
    vision_encodes: int = 0
    probe_forwards: int = 0
    probe_tokens: int = 0
    probe_encodes: int = 0
    seconds: float = 0.0
    bytes: int = 0
    refused: int = 0

    def add(self, other: TaskCost) -> None:
        """Add the counts of ``other``."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Sources:
    """A task: the chunks of these sources under one system prompt."""

    system: str | None
    sources: tuple[ChunkSource, ...]


@dataclass(frozen=True)
class Prospect:
    """What a job asks first: ids of sources that the store lacks, and the number of the model's layers."""

    missing: tuple[str, ...]
    layers: int


@dataclass(frozen=True)
class Location:
    """One chunk of `Sources`: its id and tokens, and True in ``formed`` if it was formed now; or an error."""

    source: ChunkSource
    chunk_id: str = ""
    tokens: int = 0
    formed: bool = False
    error: str | None = None


@dataclass(frozen=True)
class Branch:
    """A task: a window to compile, its chunk ids, and the source of each.

    The chunks before ``first`` belong to another branch: they are only prefilled. ``budgets`` are those of
    every chunk's patch; ``orbits`` maps the positions that need an orbit patch to its budget.
    """

    system: str | None
    path: Path
    sources: tuple[ChunkSource, ...]
    first: int
    budgets: tuple[PatchBudget, ...]
    orbits: Mapping[int, PatchBudget]


@dataclass(frozen=True)
class Growth:
    """Result of a `Branch`: the positions whose patch and whose orbit patch were formed now.

    ``failure`` is the first chunk that failed, with its error; the chunks after it were not compiled.
    """

    patches: frozenset[int]
    orbits: frozenset[int]
    failure: tuple[int, str] | None = None
