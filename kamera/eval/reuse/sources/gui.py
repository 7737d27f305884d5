"""GUI trajectories: GUI-Odyssey's episodes, a unit a screenshot with the action taken on it.

``annotations/*.json`` and ``screenshots/*.png`` (in the folder or in ``data/``), as its own preprocessing
leaves them. One question an episode: the next action at its middle or later.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kamera.errors import KameraError, TaskDataError
from kamera.eval.reuse.item import LEAST
from kamera.eval.tasks.sample import Picture, Problem, TaskSample
from kamera.eval.tasks.set_files import find_in_set

ACTIONS = ("CLICK", "SCROLL", "LONG_PRESS", "TYPE", "COMPLETE", "IMPOSSIBLE", "HOME", "BACK")


def read(data: Path, units: int) -> Iterator[TaskSample | Problem]:
    """Items of the last ``units`` screenshots up to the asked step. Raises TaskDataError without episodes."""
    folder = find_in_set(data, ["annotations"], "GUI-Odyssey")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise TaskDataError(f"{folder} has no *.json: give the GUI-Odyssey folder as published")
    for file in files:
        try:
            yield _item(folder.parent, json.loads(file.read_text(encoding="utf-8")), max(units, LEAST))
        except (KameraError, KeyError, TypeError, ValueError) as error:
            yield Problem(str(file), f"{type(error).__name__}: {error}")


def _item(top: Path, episode: Mapping[str, Any], units: int) -> TaskSample:
    steps: Sequence[Mapping[str, Any]] = episode["steps"]
    if len(steps) < LEAST:
        raise TaskDataError(f"an episode of {len(steps)} steps: {LEAST} at least are needed")
    at = max(LEAST - 1, len(steps) // 2)
    shown = steps[max(0, at + 1 - units) : at + 1]
    action = steps[at]["action"]
    if action not in ACTIONS:
        raise TaskDataError(f"action {action!r} is none of {', '.join(ACTIONS)}")
    return TaskSample(
        id=str(episode["episode_id"]),
        task=episode["task_info"]["category"],
        parts=tuple(_unit(top, step, step is shown[-1]) for step in shown),
        question=f"Task: {episode['task_info']['instruction']}\nWhich action comes next? Answer with one of "
        f"{', '.join(ACTIONS)}.",
        answer=action,
        meta={"rule": "first-word", "max_new_tokens": 8},
    )


def _unit(top: Path, step: Mapping[str, Any], now: bool) -> Picture:
    picture = top / "screenshots" / step["screenshot"]
    if not picture.is_file():
        raise TaskDataError(f"no screenshot {picture}: run the set's preprocessing")
    told = "now" if now else f"{step['action']} {step['info']}".strip()
    return Picture(picture, caption=f"Step {step['step']}: {told}\n")
