"""Run a plan: form and store the missing objects of each line's window.

First every chunk's canonical, then the patches, window by window in the order of a trie over antecedents
(`trie`), so that common antecedents are prefilled once for any order of the plan's lines. Patches are
formed behind *exact* antecedents (policy minimum "exact"), so the result does not depend on the store's
earlier contents, on interruptions, on the order of runs, or on the division of work. The store is the record
of progress: a job that was killed is run again and continues.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kamera.compile.plan import ById, PlanFile, PlannedWindow
from kamera.compile.progress import Progress, System
from kamera.compile.report import CompileReport, Probes
from kamera.compile.settings import Settings
from kamera.compile.tasks import Sources, TaskCost
from kamera.compile.worker import PlanWorker, SoloTeam, Team
from kamera.engines.hf import Backbone, HfEngine
from kamera.errors import PlanError
from kamera.store import ChunkStore


@dataclass(frozen=True)
class Step:
    """Progress of a job: ``units`` of `CompileJob.units` are done. ``doing`` is "canonicals" or "patches"."""

    doing: str
    units: int


def run_plan(
    plan: PlanFile, backbone: Backbone | HfEngine, store: ChunkStore, settings: Settings | None = None
) -> CompileReport:
    """Compile a plan completely in this process and report. Raises the errors of `CompileJob`."""
    settings = settings or Settings()
    job = CompileJob(plan, SoloTeam(backbone, store, settings), store, settings)
    for _ in job.steps():
        pass
    return job.report()


def refuse_ids(windows: Iterable[PlannedWindow], missing: Collection[tuple[System, str]], store: str) -> None:
    """Raise PlanError for chunks given by an id that is ``missing`` under its system prompt."""
    unknown = [
        f"{planned.where}: chunks[{i}]: no chunk {source.chunk_id!r} in {store!r} for this "
        "model and system prompt: give the chunk's content, or an id of kamera store ls"
        for planned in windows
        for i, source in enumerate(planned.chunks)
        if isinstance(source, ById) and (planned.system, source.chunk_id) in missing
    ]
    if unknown:
        raise PlanError(unknown)


class CompileJob:
    """One run of a plan by a team; iterating `steps` does the work, `report` gives the present state.

    ``store`` is the store that the team writes to. Raises PlanError, before anything is stored, for a chunk
    id that it does not hold and for layers that the model lacks. A line that fails by itself (unreadable
    media, a position limit) is reported and the others continue; StoreError ends the run.
    """

    def __init__(self, plan: PlanFile, team: Team, store: ChunkStore, settings: Settings) -> None:
        self.team = team
        self.settings = settings
        self.windows = plan.windows[: settings.limit]
        self.chunks = sum(len(window.chunks) for window in self.windows)  # positions in all windows
        self._progress = Progress(self.windows, settings)
        self._cost = TaskCost()
        self._check(store.url)
        self._started = time.perf_counter()

    @property
    def units(self) -> int:
        """Amount of work in the units of `steps`: distinct chunks, and positions."""
        return sum(len(sources) for sources in self._progress.sources.values()) + self.chunks

    def steps(self) -> Iterator[Step]:
        """Do the work."""
        systems = list(self._progress.sources)
        # one worker goes prompt by prompt, so that it prefills each anchor once; several do not wait at each
        for group in [[s] for s in systems] if self.team.size == 1 else [systems]:
            yield from self._locate(group)
            yield from self._compile(group)

    def report(self) -> CompileReport:
        """The report up to now."""
        progress, cost = self._progress, self._cost
        return CompileReport(
            windows=len(self.windows),
            chunks=self.chunks,
            canonicals=progress.canonicals(),
            patches=progress.patches(),
            orbits=progress.orbits(),
            refused=cost.refused,
            forwards=cost.forwards,
            tokens=cost.tokens,
            vision_encodes=cost.vision_encodes,
            probes=Probes(cost.probe_forwards, cost.probe_tokens, cost.probe_encodes),
            bytes_stored=cost.bytes,
            seconds=time.perf_counter() - self._started,
            work_seconds=cost.seconds,
            saved_tokens=progress.formed_tokens(),
            workers=self.team.size,
            reruns=self.team.reruns,
            failures=progress.failures(),
        )

    # -- inside --------------------------------------------------------------------------------

    def _locate(self, systems: Sequence[System]) -> Iterator[Step]:
        tasks = [task for s in systems for task in self._progress.locating(s, self.team.size)]
        for task, (locations, cost) in self.team.run(PlanWorker.locate, tasks):
            self._cost.add(cost)
            for location in locations:
                self._progress.enter_location(task.system, location)
            yield Step("canonicals", len(task.sources))

    def _compile(self, systems: Sequence[System]) -> Iterator[Step]:
        tasks = [task for s in systems for task in self._progress.compiling(s, self.team.size)]
        yield Step("patches", sum(self._progress.cut_off(s) for s in systems))
        for task, (growths, cost) in self.team.run(PlanWorker.compile, tasks):
            self._cost.add(cost)
            yield Step("patches", sum(map(self._progress.enter_growth, task, growths)))

    def _check(self, store: str) -> None:
        """Refuse ids that the store lacks and layers that the model lacks."""
        tasks = [
            Sources(system, tuple(source for source in sources if isinstance(source, ById)))
            for system, sources in self._progress.sources.items()
        ]
        prospects = list(self.team.run(PlanWorker.prospect, tasks))
        refuse_ids(self.windows, {(task.system, i) for task, p in prospects for i in p.missing}, store)
        problems = []
        for planned in self.windows:
            try:
                self.settings.budget_of(planned).check(prospects[0][1].layers)
            except ValueError as error:
                problems.append(f"{planned.where}: {error}")
        if problems:
            raise PlanError(problems)
