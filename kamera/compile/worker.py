"""A worker: one backbone and one store, which forms and stores one task at a time, in any process.

Results do not depend on earlier tasks: canonicals are formed behind the anchor alone, patches behind *exact*
antecedents. So the same objects are stored for any division of a plan into tasks and after any crash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from kamera.compile.plan import ById
from kamera.compile.prompt import PromptObjects
from kamera.compile.settings import Settings
from kamera.compile.tasks import Branch, Growth, Location, Prospect, Sources, TaskCost
from kamera.compile.trie import Path
from kamera.content import common_prefix
from kamera.engines.hf import Backbone, HfEngine
from kamera.errors import (
    CorruptChunk,
    KameraError,
    StoreError,
    StoreVersionError,
    UnknownChunk,
    WrongKey,
)
from kamera.patches import Facts, form_orbit
from kamera.store import ChunkStore

FLUSH_SECONDS = 60.0
"""Seconds a remote may take to store the objects of a task."""

Task = TypeVar("Task")
Result = TypeVar("Result")


class PlanWorker:
    """Runs tasks. Errors of single chunks are part of the result; StoreError and errors that are not a
    KameraError are raised.
    """

    def __init__(self, backbone: HfEngine, store: ChunkStore, settings: Settings) -> None:
        self.backbone = backbone
        self.store = store
        self.settings = settings
        self._prompt = self._prompt_of(None)
        self._errors: dict[tuple[str | None, Path], str] = {}

    def prospect(self, task: Sources) -> Prospect:
        """What is missing of the chunks that sources name, and the model's layers."""
        ids = [source.chunk_id for source in task.sources if isinstance(source, ById)]
        prompt = self._prompt_under(task.system)
        missing = tuple(chunk_id for chunk_id in ids if not prompt.has_canonical(chunk_id))
        return Prospect(missing, len(self.backbone.layout))

    def locate(self, task: Sources) -> tuple[tuple[Location, ...], TaskCost]:
        """Determine the id of each chunk, and form its canonical if that is not stored."""
        prompt = self._prompt_under(task.system)
        with self._measuring(prompt) as cost:
            locations = tuple(prompt.locate(source) for source in task.sources)
        return locations, cost

    def compile(self, branches: Sequence[Branch]) -> tuple[tuple[Growth, ...], TaskCost]:
        """Form the patches of each branch that are not stored."""
        prompt = self._prompt_under(branches[0].system)
        with self._measuring(prompt) as cost:
            growths = tuple(self._grow(prompt, branch) for branch in branches)
        return growths, cost

    # -- patches -------------------------------------------------------------------------------

    def _grow(self, prompt: PromptObjects, branch: Branch) -> Growth:
        patches: set[int] = set()
        orbits: set[int] = set()
        i = 1  # a leading chunk has no antecedents
        try:
            for i in range(1, len(branch.path)):
                path = branch.path[: i + 1]
                if (branch.system, path) in self._errors:  # of an earlier branch: it would fail again
                    raise KameraError(self._errors[branch.system, path])
                if i < branch.first:
                    continue
                if i not in patches and not prompt.has_patch(path, branch.budgets[i]):
                    self._walk(prompt, branch, i, patches)
                if i in branch.orbits and not prompt.has_patch(path, branch.orbits[i], "orbit"):
                    self._form_orbit(prompt, branch, i, patches)
                    orbits.add(i)
        except (StoreError, StoreVersionError):
            raise
        except KameraError as error:
            self._errors[branch.system, branch.path[: i + 1]] = str(error)
            return Growth(frozenset(patches), frozenset(orbits), (i, str(error)))
        return Growth(frozenset(patches), frozenset(orbits))

    def _walk(self, prompt: PromptObjects, branch: Branch, i: int, formed: set[int]) -> Sequence[Facts]:
        """Walk the line to the branch's chunk ``i``; adds patches formed on the way to ``formed``.

        What it has in common with the line stays. Returns the chunks of the line.
        """
        line = prompt.line
        chunks = line.before.chunks
        same = common_prefix([chunk.chunk_id for chunk in chunks], branch.path[: i + 1])
        line.stand(chunks[:same])
        for place in range(same, i + 1):
            facts, before = self._facts_of(prompt, branch, place), line.before
            copy, budget = line.append(facts), branch.budgets[place]
            if place and not prompt.has_patch(branch.path[: place + 1], budget):
                prompt.former.with_budget(budget).harvest(facts, copy, before)
                formed.add(place)
                prompt.count(facts.chunk_id, before.names, "exact")
        return line.before.chunks

    def _form_orbit(self, prompt: PromptObjects, branch: Branch, i: int, formed: set[int]) -> None:
        *antecedents, facts = self._walk(prompt, branch, i, formed)
        former, settings = prompt.former.with_budget(branch.orbits[i]), self.settings
        form_orbit(former, facts, antecedents, samples=settings.samples, seed=settings.seed)
        prompt.count(facts.chunk_id, branch.path[:i], "orbit")

    def _facts_of(self, prompt: PromptObjects, branch: Branch, place: int) -> Facts:
        """A chunk from its stored canonical; built again from its content if that is damaged or missing.

        Raises WrongKey for an object under a missing encryption key: it is not replaced, so a patch would
        have no canonical.
        """
        source = branch.sources[place]
        try:
            return prompt.former.known(branch.path[place])
        except WrongKey as error:
            prompt.refuse(error)
            raise
        except (CorruptChunk, UnknownChunk) as error:
            if isinstance(error, CorruptChunk):
                prompt.refuse(error)
            if isinstance(source, ById):
                raise
            facts = prompt.facts(source)
            prompt.former.canonical(facts)
            return facts

    # -- measurement ---------------------------------------------------------------------------

    @contextmanager
    def _measuring(self, prompt: PromptObjects) -> Iterator[TaskCost]:
        """Count and time the block, and check that its objects are stored."""
        cost = TaskCost()
        started, refused, formed = time.perf_counter(), prompt.refused, prompt.bytes
        backbone = self.backbone
        with backbone.measure(probes=True) as all_work, backbone.measure() as work:
            yield cost
        flushed = self.store.flush(FLUSH_SECONDS)
        if lost := (*flushed.unsaved, *flushed.dropped):
            raise StoreError(
                f"{self.store.url} has not stored {len(lost)} objects: run again, objects already stored are "
                "not formed again"
            )
        cost.forwards, cost.tokens = work.forwards, work.tokens
        cost.vision_encodes = work.vision_encodes
        cost.probe_forwards = all_work.forwards - work.forwards
        cost.probe_tokens = all_work.tokens - work.tokens
        cost.probe_encodes = all_work.vision_encodes - work.vision_encodes
        cost.refused, cost.bytes = prompt.refused - refused, prompt.bytes - formed
        cost.seconds = time.perf_counter() - started

    # -- inside --------------------------------------------------------------------------------

    def _prompt_of(self, system: str | None) -> PromptObjects:
        return PromptObjects(self.backbone, self.store, system, self.settings)

    def _prompt_under(self, system: str | None) -> PromptObjects:
        """The prompt; its objects of another one are let go of first."""
        if self._prompt.system != system:
            self._prompt = self._prompt_of(system)
        return self._prompt


class Team(Protocol):
    """Interface of a job to its workers.

    ``size`` is the number of workers, ``reruns`` the number of tasks repeated because a worker died.
    """

    @property
    def size(self) -> int: ...
    @property
    def reruns(self) -> int: ...

    def run(
        self, work: Callable[[PlanWorker, Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Run each task on some worker; results arrive as they complete."""
        ...


class SoloTeam:
    """A team of one, in this process; its window stays open from task to task."""

    size = 1
    reruns = 0

    def __init__(self, backbone: Backbone | HfEngine, store: ChunkStore, settings: Settings) -> None:
        self._worker = PlanWorker(backbone.engine, store, settings)

    def run(
        self, work: Callable[[PlanWorker, Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Run the tasks in their order."""
        for task in tasks:
            yield task, work(self._worker, task)
