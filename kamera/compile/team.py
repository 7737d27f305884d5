"""Teams of workers that run a job's tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from kamera.compile.settings import Settings
from kamera.compile.worker import Worker
from kamera.engines.hf import Backbone
from kamera.store import ChunkStore

Task = TypeVar("Task")
Result = TypeVar("Result")


class Team(Protocol):
    """Interface of a job to its workers.

    ``size`` is the number of workers, ``reruns`` the number of tasks repeated because a worker died.
    """

    @property
    def size(self) -> int: ...
    @property
    def reruns(self) -> int: ...

    def run(
        self, work: Callable[[Worker, Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Run each task on some worker; results arrive as they complete."""
        ...


class Here:
    """A team of one, in this process; its window stays open from task to task."""

    size = 1
    reruns = 0

    def __init__(self, backbone: Backbone, store: ChunkStore, settings: Settings) -> None:
        self._worker = Worker(backbone, store, settings)

    def run(
        self, work: Callable[[Worker, Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Run the tasks in their order."""
        for task in tasks:
            yield task, work(self._worker, task)
