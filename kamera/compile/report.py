"""What a compilation did: counts taken where the work happened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Counts:
    """``formed`` in this run, ``reused`` because they were there, ``skipped`` as their window failed."""

    formed: int = 0
    reused: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Failure:
    """A line that could not be compiled to its end. ``where`` is ``file:line``."""

    where: str
    error: str


@dataclass(frozen=True)
class CompileReport:
    """Outcome and cost of compiling a plan. JSON-able by `dataclasses.asdict`.

    ``windows`` and ``chunks`` are those of the plan (of its first lines, under a limit);
    ``canonicals``, ``patches`` and ``orbits`` count every place a chunk has in a window, so a chunk that
    stands in two windows counts twice. ``forwards``, ``tokens`` (run through the decoder) and
    ``vision_encodes`` are counted by hooks on the model. ``bytes_stored`` is what the store grew by,
    ``seconds`` wall time.
    """

    windows: int
    chunks: int
    canonicals: Counts
    patches: Counts
    orbits: Counts
    forwards: int
    tokens: int
    vision_encodes: int
    bytes_stored: int
    seconds: float
    failures: tuple[Failure, ...]
