"""Outcome of a compilation, from counts taken on the model and the store."""

from __future__ import annotations

from dataclasses import dataclass

from kamera.compile.tasks import TaskCost
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
class BreakEven:
    """Reuses after which each patch formed in a run has repaid its cost; seconds by the run's clock.

    ``context_seconds`` is the time of the forwards in context of the chunks whose patches were formed, which
    a window without them would spend again; ``serving_seconds`` the time to serve all of them from memory,
    measured on some. One reuse of each saves the difference. None if it saves nothing.

    ``harvested``: for a window that prefills these chunks anyway, the extra cost is that of the missing
    canonicals (``canonical_seconds``) and of the patches (``forming_seconds``). ``compiled``: ahead of any
    window, all work of the run is extra cost: antecedents, media and orbit patches too.
    """

    harvested: float | None
    compiled: float | None
    context_seconds: float
    serving_seconds: float
    canonical_seconds: float
    forming_seconds: float

    @classmethod
    def of(cls, cost: TaskCost, tokens: int) -> BreakEven:
        """Break-even of a run that formed patches of ``tokens`` tokens."""
        serving = tokens * cost.applied_seconds / cost.applied_tokens if cost.applied_tokens else 0.0
        saved = cost.context_seconds - serving
        extra = cost.canonical_seconds + cost.forming_seconds
        return cls(
            harvested=extra / saved if saved > 0 else None,
            compiled=cost.seconds / saved if saved > 0 else None,
            context_seconds=cost.context_seconds,
            serving_seconds=serving,
            canonical_seconds=cost.canonical_seconds,
            forming_seconds=cost.forming_seconds,
        )


@dataclass(frozen=True)
class Batches:
    """Canonicals that shared a forward (`compile.canonicals`), and the trials that allowed it.

    ``trials`` batches were run once more to compare rows; ``equal`` of them agreed in every bit.
    """

    canonicals: int
    trials: int
    equal: int


@dataclass(frozen=True)
class Probes:
    """Model work of probes: each worker asks its model one for each system prompt that it opens."""

    forwards: int
    tokens: int
    vision_encodes: int


@dataclass(frozen=True)
class CompileReport:
    """Outcome and cost of compiling a plan. JSON-able by `dataclasses.asdict`.

    ``windows`` are those of the plan (of its first lines, under a limit), ``chunks`` the places in them;
    ``canonicals``, ``patches`` and ``orbits`` count every place a chunk has in a window, so a chunk that
    stands in two windows counts twice. ``refused`` objects were there and not taken: damaged ones were
    made again, those under a key that was not given fail their windows. ``forwards``, ``tokens`` (run
    through the decoder) and ``vision_encodes`` are counted by hooks on the model; ``probes`` are that on
    top, and `usage` is all of it. ``bytes_stored`` are those of the canonicals and patches that were formed,
    as stored.

    ``seconds`` is wall time, ``work_seconds`` the sum over workers by their ``clock``, and
    ``decoder_seconds`` its part inside the decoder. ``saved_tokens`` are the tokens that one reuse of every
    patch formed here does not prefill; ``break_even`` is None if none was formed.

    ``workers`` is the size of the team, ``reruns`` the tasks repeated because a worker died.
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
    probes: Probes
    batches: Batches
    bytes_stored: int
    seconds: float
    work_seconds: float
    decoder_seconds: float
    clock: str
    saved_tokens: int
    break_even: BreakEven | None
    workers: int
    reruns: int
    failures: tuple[Failure, ...]

    def usage(self) -> Usage:
        """All model work of the job, probes included: equal to hooks on the models of its workers.

        Seconds are ``work_seconds``; nothing of a job is later work.
        """
        probes = self.probes
        now = Spent(
            self.forwards + probes.forwards,
            self.tokens + probes.tokens,
            self.vision_encodes + probes.vision_encodes,
            self.work_seconds,
        )
        return Usage(now, Spent())
