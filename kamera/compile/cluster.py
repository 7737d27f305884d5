"""A plan on Ray: workers load the model once, compile parts of the plan, and open the same store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from kamera.compile.job import CompileJob, run_plan
from kamera.compile.plan import PlanFile, PlannedWindow
from kamera.compile.report import CompileReport, Settings, add_reports
from kamera.engines.hf import HfEngine
from kamera.store import ChunkStore

_PARTS = 4  # of a plan for each worker, so that none is idle for long
_DEATHS = 3  # workers that one part may kill


class _Worker:
    """A process of Ray, with the model."""

    def __init__(
        self,
        load: Callable[[], HfEngine],
        store: Callable[[], ChunkStore],
        settings: Settings,
        threads: int,
    ) -> None:
        torch.set_num_threads(threads)  # their number may change the last bit of a sum
        self._engine, self._store, self._settings = load(), store, settings

    def check(self, plan: PlanFile) -> str:
        """The model's fingerprint. Raises as `CompileJob`."""
        with self._store() as store:
            CompileJob(plan, self._engine, store, self._settings)
        return self._engine.fingerprint

    def run(self, part: PlanFile) -> CompileReport:
        with self._store() as store:
            return run_plan(part, self._engine, store, self._settings)


def run_on_ray(
    plan: PlanFile,
    load: Callable[[], HfEngine],
    store: Callable[[], ChunkStore],
    settings: Settings,
    workers: int,
    *,
    gpu: bool = False,
) -> CompileReport:
    """Compile a plan by ``workers`` processes on Ray, each with a GPU of its own if ``gpu``.

    The part of a worker that died is run again. Raises as `CompileJob`; ValueError without Ray, with fewer
    processors than workers, and for workers that ``load`` different models; ChildProcessError for a part that
    has killed three.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError(f"workers need Ray ({error}): pip install 'kamera-kv[ray]'") from None
    plan = replace(plan, windows=plan.windows[: settings.limit])
    arguments = (load, store, replace(settings, limit=None), torch.get_num_threads())
    kind = "GPU" if gpu else "CPU"
    with ray.init(log_to_driver=False, configure_logging=False):
        if (most := int(ray.cluster_resources().get(kind, 0))) < workers:
            raise ValueError(f"{workers} workers on a cluster with {most} {kind}: give at most {most}")
        needs = {"num_cpus": 1, "num_gpus": int(gpu), "max_restarts": -1, "max_task_retries": _DEATHS - 1}
        team: list[Any] = [ray.remote(_Worker).options(**needs).remote(*arguments) for _ in range(workers)]
        try:
            if len({*ray.get([worker.check.remote(plan) for worker in team])}) > 1:
                raise ValueError("the workers loaded different models: give all of them the same files")
            parts = divide(plan, _PARTS * workers)
            report: CompileReport = reduce(add_reports, ray.util.ActorPool(team).map_unordered(_send, parts))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayActorError as error:
            raise ChildProcessError(
                f"a part of the plan has killed {_DEATHS} workers: stored objects stay; give workers more "
                "memory, or find the window with --limit"
            ) from error
    places = [window.where for window in plan.windows]
    failures = sorted(report.failures, key=lambda failure: places.index(failure.where))
    return replace(report, failures=tuple(failures))


def divide(plan: PlanFile, count: int) -> list[PlanFile]:
    """At most ``count`` parts, equal in chunks. Windows that begin alike share prefills, and so a part."""
    alike: dict[Any, list[PlannedWindow]] = {}
    for window in plan.windows:
        alike.setdefault((window.system, window.chunks[0]), []).append(window)
    parts: list[list[PlannedWindow]] = [[] for _ in range(count)]
    for group in sorted(alike.values(), key=_chunks, reverse=True):
        min(parts, key=_chunks).extend(group)
    return [replace(plan, windows=tuple(part)) for part in parts if part]


def _send(worker: Any, part: PlanFile) -> Any:
    return worker.run.remote(part)


def _chunks(windows: Sequence[PlannedWindow]) -> int:
    return sum(len(window.chunks) for window in windows)
