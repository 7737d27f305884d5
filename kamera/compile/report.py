"""What a compilation did: counts taken where the work happened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["formed", "reused", "skipped"]


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

    ``work_seconds`` is the time workers spent (all of them together), ``decoder_seconds`` that part of
    it inside the decoder. ``saved_tokens`` are what one reuse of every patch formed here does not
    prefill. ``break_even_reuses`` is how often each of them has to be reused until the run is repaid:
    ``work_seconds`` against ``saved_tokens`` at this run's seconds per decoder token; None when no
    patch was formed.

    ``workers`` is the size of the team, ``reruns`` the tasks done again because a worker died.
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
    work_seconds: float
    decoder_seconds: float
    saved_tokens: int
    break_even_reuses: float | None
    workers: int
    reruns: int
    failures: tuple[Failure, ...]
