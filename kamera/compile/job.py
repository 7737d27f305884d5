"""Run a plan: form and store what is missing behind each line's windows, and nothing else.

Patches are formed behind *exact* antecedents (policy minimum "exact"), so what a plan leaves behind
does not depend on what was stored before, on interruptions, or on the order of runs. The store is the
record of progress: a job that was killed is run again and goes on where it stopped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from kamera.backbones import Backbone, Chunk
from kamera.compile.lookup import Lookup, context_of
from kamera.compile.plan import ChunkSource, Described, Plan, PlanError, PlannedWindow, Stored
from kamera.compile.report import CompileReport, Counts, Failure
from kamera.errors import CorruptChunk, KameraError, StoreError, StoreVersionError, UnreadableMedia
from kamera.ops import PatchBudget
from kamera.store import ChunkStore
from kamera.window import KameraWindow, ReusePolicy

Outcome = Literal["formed", "reused", "skipped"]


class NotStored(KameraError):
    """What a window archived is not in the store afterwards."""


@dataclass(frozen=True)
class Step:
    """One chunk of one window is done (or given up). ``where`` is the window's ``file:line``."""

    where: str
    chunk: int
    outcome: Outcome


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


def run_plan(
    plan: Plan, backbone: Backbone, store: ChunkStore, settings: Settings | None = None
) -> CompileReport:
    """Compile a plan to its end and report. Raises what `Job` raises."""
    job = Job(plan, backbone, store, settings)
    for _ in job.steps():
        pass
    return job.report()


class Job:
    """One run of a plan; `steps` does the work as it is iterated, `report` tells where it stands.

    Raises PlanError, before anything is stored, for a chunk id the store does not hold. A line that
    fails for its own reasons (unreadable media, a position limit) is reported and the rest goes on;
    StoreError ends the run.
    """

    def __init__(
        self, plan: Plan, backbone: Backbone, store: ChunkStore, settings: Settings | None = None
    ) -> None:
        self.plan = plan
        self.backbone = backbone
        self.store = store
        self.settings = settings or Settings()
        self.windows = plan.windows[: self.settings.limit]
        self._lookups: dict[str | None, Lookup] = {}
        self._ids: dict[str, str] = {}  # description to chunk id
        self._built: tuple[str, Chunk] | None = None
        self._window: tuple[str | None, KameraWindow] | None = None
        self._counts: Counter[tuple[str, Outcome]] = Counter()
        self._work: Counter[str] = Counter()
        self._failures: list[Failure] = []
        self._check_ids()
        self._started = time.perf_counter()
        self._bytes = store.stats().bytes

    @property
    def chunks(self) -> int:
        """Places to fill; as many as `steps` yields."""
        return sum(len(window.chunks) for window in self.windows)

    def steps(self) -> Iterator[Step]:
        """Do the work, one step for each chunk of each window."""
        for planned in self.windows:
            done = 0
            try:
                for done, outcome in enumerate(self._compile(planned), start=1):
                    yield Step(planned.where, done - 1, outcome)
            except (StoreError, StoreVersionError):
                raise
            except KameraError as error:
                self._failures.append(Failure(planned.where, f"chunks[{done}]: {error}"))
                self._window = None
                for i in range(done, len(planned.chunks)):
                    self._skip(i)
                    yield Step(planned.where, i, "skipped")
        self._window = self._built = None

    def report(self) -> CompileReport:
        """What has been done so far."""
        return CompileReport(
            windows=len(self.windows),
            chunks=self.chunks,
            canonicals=self._counted("canonicals"),
            patches=self._counted("patches"),
            orbits=self._counted("orbits"),
            forwards=self._work["forwards"],
            tokens=self._work["tokens"],
            vision_encodes=self._work["vision_encodes"],
            bytes_stored=max(0, self.store.stats().bytes - self._bytes),
            seconds=time.perf_counter() - self._started,
            failures=tuple(self._failures),
        )

    # -- one window ----------------------------------------------------------------------------

    def _compile(self, planned: PlannedWindow) -> Iterator[Outcome]:
        lookup = self._lookup(planned.system)
        ids: list[str] = []
        for i, source in enumerate(planned.chunks):
            ids.append(self._id_of(source))
            wanted = self._missing(lookup, ids, i)
            if wanted:
                self._reach(lookup, planned, ids)
            if "orbits" in wanted:
                with self._measured():
                    self._open(planned.system).form_orbit(
                        i, samples=self.settings.samples, seed=self.settings.seed
                    )
            if wanted and self._missing(lookup, ids, i):
                raise NotStored(
                    f"chunk {ids[i][:12]} was prefilled but {self.store!r} does not hold it: it stands past "
                    "a position limit even alone, or a memory store let go of it; cut it smaller, or give "
                    "the store more room"
                )
            for kind in self._kinds(i):
                self._counts[kind, "formed" if kind in wanted else "reused"] += 1
            yield "formed" if wanted else "reused"

    def _kinds(self, i: int) -> list[str]:
        """What the ``i``-th chunk of a window needs; a leading one absorbs nothing."""
        return ["canonicals", *(["patches"] if i else []), *(["orbits"] if i and self.settings.orbit else [])]

    def _missing(self, lookup: Lookup, ids: list[str], i: int) -> set[str]:
        held = {
            "canonicals": lambda: lookup.has_canonical(ids[i]),
            "patches": lambda: lookup.has_patch(ids[i], ids[:i]),
            "orbits": lambda: lookup.has_orbit(ids[i], ids[:i]),
        }
        return {kind for kind in self._kinds(i) if not held[kind]()}

    def _skip(self, i: int) -> None:
        for kind in self._kinds(i):
            self._counts[kind, "skipped"] += 1

    def _reach(self, lookup: Lookup, planned: PlannedWindow, ids: list[str]) -> None:
        """Make the open window hold ``ids``, all exact; what it has in common with the last one stays."""
        window = self._open(planned.system)
        held = [slot.chunk_id for slot in window.slots]
        shared = 0
        while shared < min(len(held), len(ids)) and held[shared] == ids[shared]:
            shared += 1
        while len(window) > shared:  # from the tail nothing survives, so this costs nothing
            window.evict(len(window) - 1)
        for i in range(shared, len(ids)):
            with self._measured():
                self._bring(window, lookup, planned.chunks[i], ids[i])

    def _bring(self, window: KameraWindow, lookup: Lookup, source: ChunkSource, chunk_id: str) -> None:
        if isinstance(source, Stored):
            window.recall(chunk_id)
            return
        if lookup.has_canonical(chunk_id):
            with suppress(CorruptChunk):  # it is set aside now, and made again
                window.recall(chunk_id)
                return
        window.append(self._build(source))

    def _open(self, system: str | None) -> KameraWindow:
        if self._window is None or self._window[0] != system:
            self._window = None  # let go of the old KV first
            policy = ReusePolicy(
                minimum="exact",
                on_miss="form",
                rank=self.settings.rank,
                patch_bytes=self.settings.patch_bytes,
            )
            with self._measured():
                self._window = (system, KameraWindow(self.backbone, self.store, system, policy=policy))
        return self._window[1]

    # -- chunks --------------------------------------------------------------------------------

    def _id_of(self, source: ChunkSource) -> str:
        """The chunk's id: the processor runs once per description, the model never."""
        if isinstance(source, Stored):
            return source.chunk_id
        if source.key not in self._ids:
            self._ids[source.key] = self._build(source).id
        return self._ids[source.key]

    def _build(self, source: Described) -> Chunk:
        """The chunk itself; the last one built is kept, as it is asked for again if it is new."""
        if self._built is None or self._built[0] != source.key:
            self._built = (source.key, self._process(source))
        return self._built[1]

    def _process(self, source: Described) -> Chunk:
        try:
            return self.backbone.chunk([dict(item) for item in source.items])
        except KameraError:
            raise
        except ValueError as error:  # a processor's own refusal: a picture too narrow, say
            raise UnreadableMedia(f"{source.key[:80]} was refused by the processor: {error}") from error

    def _lookup(self, system: str | None) -> Lookup:
        if system not in self._lookups:
            context = context_of(self.backbone, self.store, system)
            self._lookups[system] = Lookup(self.store, context, self.settings.budget, self.settings.samples)
        return self._lookups[system]

    def _check_ids(self) -> None:
        unknown = [
            f"{planned.where}: chunks[{i}]: no chunk {source.chunk_id!r} in {self.store.url!r} for this "
            "model and system prompt: give the chunk's content, or an id of kamera store ls"
            for planned in self.windows
            for i, source in enumerate(planned.chunks)
            if isinstance(source, Stored) and not self._lookup(planned.system).has_canonical(source.chunk_id)
        ]
        if unknown:
            raise PlanError(unknown)

    # -- counting ------------------------------------------------------------------------------

    @contextmanager
    def _measured(self) -> Iterator[None]:
        with self.backbone.measure() as work:
            try:
                yield
            finally:
                self._work["forwards"] += work.forwards
                self._work["tokens"] += work.tokens
                self._work["vision_encodes"] += work.vision_encodes

    def _counted(self, kind: str) -> Counts:
        return Counts(*(self._counts[kind, outcome] for outcome in ("formed", "reused", "skipped")))
