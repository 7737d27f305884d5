"""The benchmarks by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kamera.eval.tasks.sample import Task

_PLACES = {
    "mm-niah": "mm_niah:MMNiah",
    "milebench": "milebench:MileBench",
    "muirbench": "muirbench:MuirBench",
    "video-mme": "video_mme:VideoMME",
    "egoschema": "egoschema:EgoSchema",
}
NAMES = tuple(_PLACES)


def make_task(name: str, **options: Any) -> Task:
    """The benchmark called ``name``; ``options`` (``subtasks``, ``split``, …) are its own.

    Raises ValueError for a name outside `NAMES`.
    """
    if name not in _PLACES:
        raise ValueError(f"task {name!r} is none of {', '.join(NAMES)}")
    module, _, cls = _PLACES[name].partition(":")
    task: Task = getattr(import_module(f"kamera.eval.tasks.{module}"), cls)(**options)
    return task
