"""A team on Ray: every worker loads the model once, pulls tasks, and writes to one shared store.

Ray starts a worker that dies again and repeats its task; objects it had stored are not formed again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from kamera.compile.settings import Settings
from kamera.compile.worker import PlanWorker, Result, Task
from kamera.engines.hf import Backbone, HfEngine
from kamera.errors import ClusterError, quote
from kamera.store import ChunkStore

DEATHS = 3
"""Workers that one task may kill before the job is aborted."""

_OBJECTS = 80 * 2**20  # bytes of Ray's own object store: tasks and results are ids and counts


@dataclass(frozen=True)
class Cluster:
    """Placement of workers: a Ray ``address`` (None: Ray is started here for the job), and their number."""

    address: str | None
    workers: int | None

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """``local``, ``local:N`` (this machine), ``ray`` (the machine's cluster) or ``ray://HOST:PORT``.

        Raises ValueError for anything else.
        """
        local = re.fullmatch(r"local(?::([1-9][0-9]*))?", text)
        if local:
            return cls(None, int(local.group(1)) if local.group(1) else max(2, torch.cuda.device_count()))
        if text == "ray":
            return cls("auto", None)
        if re.fullmatch(r"ray://[^/\s]+:[0-9]+", text):
            return cls(text, None)
        raise ValueError(f"cluster {quote(text)} is none of local, local:N, ray, ray://HOST:PORT")


class _Actor:
    """The actor in a worker's process. It loads the model for the first task and keeps it."""

    def __init__(
        self,
        load: Callable[[], Backbone | HfEngine],
        open_store: Callable[[], ChunkStore],
        settings: Settings,
        threads: int,
    ) -> None:
        self._load = load
        self._open_store = open_store
        self._settings = settings
        self._threads = threads

    @cached_property
    def _worker(self) -> PlanWorker:
        # Ray sets one thread; their number may change the last bit of a sum
        torch.set_num_threads(self._threads)
        return PlanWorker(self._load().engine, self._open_store(), self._settings)

    def answer(self, work: Callable[[PlanWorker, Any], Any] | None, task: Any) -> tuple[int, str, Any]:
        """This process, its backbone's fingerprint, and the result of ``work`` on ``task``; None without."""
        fingerprint = self._worker.backbone.fingerprint
        return os.getpid(), fingerprint, None if work is None else work(self._worker, task)


class RayTeam:
    """Workers on Ray. A context manager that ends them (and Ray, if it was started here).

    Every worker calls ``load`` and ``open_store``, so Ray must be able to serialise them: for example
    `functools.partial` of `Backbone.from_pretrained` and of `ChunkStore.open`. Model, store and the plan's
    files must be reachable from the workers. Each worker takes a GPU if ``gpu`` is true, and ``threads``
    threads (default: torch's present number).

    Raises ClusterError if Ray is not installed or not reachable, for workers that load different models, and
    if a task has killed three workers; also the errors of loading.
    """

    def __init__(
        self,
        cluster: Cluster,
        load: Callable[[], Backbone | HfEngine],
        open_store: Callable[[], ChunkStore],
        settings: Settings,
        *,
        gpu: bool = False,
        threads: int | None = None,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise ClusterError(f"a cluster needs Ray ({error}): pip install 'kamera[ray]'") from None
        self._ray = ray
        self._owns = not ray.is_initialized()
        if self._owns:
            self._connect(cluster)
        self._fingerprint: str | None = None
        self._processes: dict[int, None] = {}  # that have answered, as ordered set
        self._lost = 0
        actor = ray.remote(_Actor).options(
            num_cpus=1, num_gpus=1 if gpu else 0, max_restarts=-1, max_task_retries=DEATHS - 1
        )
        given = (load, open_store, settings, threads or torch.get_num_threads())
        count = cluster.workers or self._default_size(gpu)
        self._actors: list[Any] = [actor.remote(*given) for _ in range(count)]
        try:
            for reference in [actor.answer.remote(None, None) for actor in self._actors]:
                self._result(ray.get, reference)
        except BaseException:
            self.close()
            raise
        self.pids = tuple(self._processes)

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self._actors)

    @property
    def reruns(self) -> int:
        """Number of tasks repeated because a worker died: Ray starts it again."""
        return len(self._processes) - len(self.pids) + self._lost

    def run(
        self, work: Callable[[PlanWorker, Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Run the tasks; idle workers pull the next one, and results arrive as they complete."""
        pool = self._ray.util.ActorPool(self._actors)
        for i, task in enumerate(tasks):
            pool.submit(partial(_send, work), (i, task))
        while pool.has_next():
            i, result = self._result(pool.get_next_unordered)
            yield tasks[i], result

    def close(self) -> None:
        """End the workers."""
        for actor in self._actors:
            self._ray.kill(actor)
        self._actors = []
        if self._owns:
            self._ray.shutdown()

    def __enter__(self) -> RayTeam:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------

    def _connect(self, cluster: Cluster) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if cluster.address is None:
            # without "local" Ray joins any cluster it finds on this machine, and refuses num_cpus
            options |= {"address": "local", "num_cpus": cluster.workers, "include_dashboard": False}
            options |= {"object_store_memory": _OBJECTS}
        else:
            options |= {"address": cluster.address}
        try:
            self._ray.init(**options)
        except Exception as error:  # a node that does not start in time is a plain Exception
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ClusterError(
                f"no Ray at {cluster.address or 'this machine'}: {first}; start one with ray start --head, "
                "or use --cluster local"
            ) from error

    def _default_size(self, gpu: bool) -> int:
        """One worker for every GPU of the cluster, or for every machine."""
        if gpu:
            count = int(self._ray.cluster_resources().get("GPU", 0))
            if count < 1:
                raise ClusterError("the cluster has no GPU: give --device cpu, or machines that have one")
            return count
        return max(1, sum(node["Alive"] for node in self._ray.nodes()))

    def _result(self, take: Callable[..., Any], *given: Any) -> Any:
        """A worker's answer. Raises its own exception."""
        try:
            process, fingerprint, result = take(*given)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except self._ray.exceptions.RayActorError as error:
            self._lost += DEATHS - 1
            reason = " ".join(str(error).split())[:200]
            raise ClusterError(
                f"one task has killed {DEATHS} workers ({reason}): stored objects stay; give workers more "
                "memory, or run with --limit to find the window that causes it"
            ) from error
        self._processes[process] = None
        self._fingerprint = self._fingerprint or fingerprint
        if fingerprint != self._fingerprint:
            raise ClusterError(
                f"workers loaded different models ({self._fingerprint[:12]} and {fingerprint[:12]}): give "
                "one directory all of them see, or the same files on every machine"
            )
        return result


def _numbered(
    work: Callable[[PlanWorker, Any], Any], worker: PlanWorker, task: tuple[int, Any]
) -> tuple[int, Any]:
    return task[0], work(worker, task[1])


def _send(work: Callable[[PlanWorker, Any], Any], actor: Any, task: tuple[int, Any]) -> Any:
    return actor.answer.remote(partial(_numbered, work), task)
