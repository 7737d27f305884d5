"""Run a plan: form and store the missing objects of each line's window.

First every chunk's canonical, then the patches, window by window in the order of a trie over antecedents
(`trie`), so that common antecedents are prefilled once for any order of the plan's lines. Canonicals are
formed behind the anchor alone, patches behind *exact* antecedents, so the result does not depend on the
store's earlier contents, on interruptions, or on a division of the plan among processes. The store is the
record of progress: a job that was killed is run again and continues.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kamera.compile.plan import ById, PlanFile, PlannedWindow
from kamera.compile.progress import Progress, System
from kamera.compile.prompt import PromptObjects
from kamera.compile.report import CompileReport
from kamera.compile.settings import Settings
from kamera.engines import Account
from kamera.engines.hf import Backbone, HfEngine
from kamera.errors import PlanError, StoreError
from kamera.store import ChunkStore

FLUSH_SECONDS = 60.0
"""Seconds a remote may take to store the objects of a step."""

_CHUNKS = 64
"""Most chunks that one step locates."""


@dataclass(frozen=True)
class Step:
    """Progress of a job: ``units`` of `CompileJob.units` are done. ``doing`` is "canonicals" or "patches"."""

    doing: str
    units: int


def run_plan(
    plan: PlanFile, backbone: Backbone | HfEngine, store: ChunkStore, settings: Settings | None = None
) -> CompileReport:
    """Compile a plan completely and report. Raises the errors of `CompileJob`."""
    job = CompileJob(plan, backbone, store, settings or Settings())
    for _ in job.steps():
        pass
    return job.report()


def refuse_ids(windows: Iterable[PlannedWindow], missing: Collection[tuple[System, str]], store: str) -> None:
    """Raise PlanError for chunks given by an id that is ``missing`` under its system prompt."""
    unknown = [
        f"{window.where}: chunks[{i}]: no chunk {source.chunk_id!r} in {store!r} for this "
        "model and system prompt: give the chunk's content, or an id of kamera store ls"
        for window in windows
        for i, source in enumerate(window.chunks)
        if isinstance(source, ById) and (window.system, source.chunk_id) in missing
    ]
    if unknown:
        raise PlanError(unknown)


class CompileJob:
    """One run of a plan; iterating `steps` does the work, `report` gives the present state.

    Raises PlanError, before anything is stored, for a chunk id that the store does not hold and for layers
    that the model lacks. A line that fails by itself (unreadable media, a position limit) is reported and the
    others continue; StoreError ends the run.
    """

    def __init__(
        self, plan: PlanFile, backbone: Backbone | HfEngine, store: ChunkStore, settings: Settings
    ) -> None:
        self.backbone = backbone.engine
        self.store = store
        self.settings = settings
        self.windows = plan.windows[: settings.limit]
        self.chunks = sum(len(window.chunks) for window in self.windows)  # positions in all windows
        self._progress = Progress(self.windows, settings)
        self._account = Account()
        self._refusals = self._bytes = 0
        self._check()

    @property
    def units(self) -> int:
        """Amount of work in the units of `steps`: distinct chunks, and positions."""
        return sum(len(sources) for sources in self._progress.sources.values()) + self.chunks

    def steps(self) -> Iterator[Step]:
        """Do the work, prompt by prompt, so that each anchor is prefilled once."""
        progress = self._progress
        for system, sources in progress.sources.items():
            prompt = self._prompt(system)
            for i in range(0, len(sources), _CHUNKS):
                with self._count(prompt):
                    for source in sources[i : i + _CHUNKS]:
                        progress.enter(system, source, prompt.locate(source))
                yield Step("canonicals", len(sources[i : i + _CHUNKS]))
            branches = progress.branches(system)
            yield Step("patches", progress.count_cut_off(system))
            for branch in branches:
                with self._count(prompt):
                    prompt.grow(branch)
                yield Step("patches", sum(node.places for node in branch.nodes[branch.first :]))

    def report(self) -> CompileReport:
        """The report up to now."""
        progress, work = self._progress, self._account.usage.now
        return CompileReport(
            windows=len(self.windows),
            chunks=self.chunks,
            canonicals=progress.canonicals(),
            patches=progress.patches(),
            orbits=progress.orbits(),
            refused=self._refusals,
            forwards=work.forwards,
            tokens=work.tokens,
            vision_encodes=work.vision_encodes,
            bytes_stored=self._bytes,
            seconds=work.seconds,
            saved_tokens=progress.formed_tokens(),
            failures=progress.failures(),
        )

    # -- inside --------------------------------------------------------------------------------

    def _prompt(self, system: System) -> PromptObjects:
        return PromptObjects(self.backbone, self.store, system, self.settings)

    @contextmanager
    def _count(self, prompt: PromptObjects) -> Iterator[None]:
        """Count the work of the block, and check that its objects are stored."""
        refusals, size = prompt.refusals, prompt.bytes
        with self._account.count_now(self.backbone):
            yield
            outcome = self.store.flush(FLUSH_SECONDS)
        if keys := (*outcome.unsaved, *outcome.dropped):
            raise StoreError(
                f"{self.store.url} has not stored {len(keys)} objects: run again, objects already stored are "
                "not formed again"
            )
        self._refusals += prompt.refusals - refusals
        self._bytes += prompt.bytes - size

    def _check(self) -> None:
        """Refuse ids that the store lacks and layers that the model lacks."""
        unknown_ids = set()
        for system, sources in self._progress.sources.items():
            prompt = self._prompt(system)
            ids = [source.chunk_id for source in sources if isinstance(source, ById)]
            unknown_ids |= {(system, chunk_id) for chunk_id in ids if not prompt.has_canonical(chunk_id)}
        refuse_ids(self.windows, unknown_ids, self.store.url)
        problems = []
        for window in self.windows:
            try:
                self.settings.budget_of(window).check(len(self.backbone.layout))
            except ValueError as error:
                problems.append(f"{window.where}: {error}")
        if problems:
            raise PlanError(problems)
