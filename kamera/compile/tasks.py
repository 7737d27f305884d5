"""What a worker is asked to do, and what it answers: ids, counts and descriptions, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kamera.compile.ordering import Path
from kamera.compile.plan import ChunkSource
from kamera.ops import PatchBudget


@dataclass(eq=False)
class Cost:
    """Work done: counts by hooks on the model, seconds by the worker's `Clock`.

    ``seconds`` is all of a task's. Of that: ``decoder_seconds`` inside the decoder; ``canonical_seconds``
    forming and archiving canonicals; ``context_seconds`` prefilling, in context, the chunks whose patches
    were formed; ``forming_seconds`` making those patches of it and storing them.
    ``applied_seconds`` is what serving some of those patches, of ``applied_tokens`` tokens, took.

    ``batched`` canonicals came out of a forward of several; ``trials`` forwards were spent to see whether
    that is right, and was for ``trials_equal`` of them. ``bytes`` are those of the canonicals and
    patches that were formed, as stored. ``refused`` stored objects were not taken.
    """

    forwards: int = 0
    tokens: int = 0
    vision_encodes: int = 0
    seconds: float = 0.0
    decoder_seconds: float = 0.0
    canonical_seconds: float = 0.0
    context_seconds: float = 0.0
    forming_seconds: float = 0.0
    applied_seconds: float = 0.0
    applied_tokens: int = 0
    batched: int = 0
    trials: int = 0
    trials_equal: int = 0
    bytes: int = 0
    refused: int = 0

    def add(self, other: Cost) -> None:
        """Count ``other`` too."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class About:
    """Layers of a worker's model, and the name of its clock."""

    layers: int
    clock: str


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
    ``budgets`` are those of every chunk's patch; orbit patches are owed for the places in ``orbits``,
    within the budgets there.
    """

    system: str | None
    index: int
    path: Path
    sources: tuple[ChunkSource, ...]
    first: int
    budgets: tuple[PatchBudget, ...]
    orbits: Mapping[int, PatchBudget]


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
