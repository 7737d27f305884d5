"""Outcome of a compilation, from counts taken on the model and the store."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from kamera.engines import Spent, Usage


@dataclass(frozen=True)
class ObjectCounts:
    """``formed`` in this run, ``reused`` from the store, ``skipped`` because their window failed."""

    formed: int = 0
    reused: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class Failure:
    """A line that could not be compiled completely. ``where`` is ``file:line``."""

    where: str
    error: str


@dataclass(frozen=True)
class CompileReport:
    """Outcome and cost of compiling a plan. JSON-able by `dataclasses.asdict`.

    ``windows`` are those of the plan (of its first lines, under a limit), ``chunks`` the places in them;
    ``canonicals``, ``patches`` and ``orbits`` count every place a chunk has in a window, so a chunk that
    stands in two windows counts twice. ``refused`` objects were there and not taken: damaged ones were
    made again, those under a key that was not given fail their windows. ``forwards``, ``tokens`` (run
    through the decoder) and ``vision_encodes`` are counted by hooks on the model. ``bytes_stored`` are those
    of the canonicals and patches that were formed, as stored.

    ``seconds`` are those of the work. ``saved_tokens`` are the tokens that one reuse of every patch formed
    here does not prefill.
    """

    windows: int
    chunks: int
    canonicals: ObjectCounts
    patches: ObjectCounts
    orbits: ObjectCounts
    refused: int
    forwards: int
    tokens: int
    vision_encodes: int
    bytes_stored: int
    seconds: float
    saved_tokens: int
    failures: tuple[Failure, ...]

    def usage(self) -> Usage:
        """All model work of the job: equal to hooks. Nothing of a job is later work."""
        return Usage(Spent(self.forwards, self.tokens, self.vision_encodes, self.seconds), Spent())


def add_reports(one: Any, other: Any) -> Any:
    """The sum of two reports, field by field."""
    if not is_dataclass(one):
        return one + other
    sums = {f.name: add_reports(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)}
    return replace(one, **sums)  # type: ignore[type-var]
