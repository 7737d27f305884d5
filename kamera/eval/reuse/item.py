"""Items of the benchmark of reuse: units, windows over time, and a question behind the last of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kamera.errors import TaskDataError

LEAST = 4
"""Visual units that an item's window has at least."""


@dataclass(frozen=True)
class WindowTrace:
    """Windows one after another, each a list of unit names; the question comes behind the last."""

    name: str
    windows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Item:
    """One question of a set, with its windows.

    ``units`` are chat content by name; in a frozen benchmark an image is ``{"type": "image", "image": FILE}``
    with a file of its media folder. ``window`` is the published order; every trace ends in it, so the
    published ``answer`` holds for each, and the exact answer is the same for all. ``live`` arrives with the
    ``question`` text (pictures among the choices). ``meta`` names the scorer (``rule``,
    `kamera.eval.reuse.scoring`) and what it needs beside ``answer`` and ``choices``.
    """

    id: str
    source: str
    task: str
    units: Mapping[str, Sequence[Mapping[str, Any]]]
    window: tuple[str, ...]
    question: str
    answer: Any
    meta: Mapping[str, Any]
    live: tuple[Sequence[Mapping[str, Any]], ...] = ()
    choices: tuple[str, ...] = ()
    max_new_tokens: int = 16
    traces: tuple[WindowTrace, ...] = ()

    def check(self) -> None:
        """Raise TaskDataError for an item that breaks what is promised above."""
        if (seen := sum(_is_visual(self.units.get(name, ())) for name in self.window)) < LEAST:
            raise TaskDataError(
                f"item {self.id} shows {seen} visual units: at least {LEAST} belong in a window"
            )
        if len({trace.name for trace in self.traces}) < len(self.traces):
            raise TaskDataError(f"item {self.id} has two traces of one name")
        for trace in self.traces:
            for window in trace.windows:
                if unknown := sorted(set(window) - set(self.units)):
                    raise TaskDataError(f"item {self.id}, trace {trace.name}: no unit {unknown[0]!r}")
                if len(set(window)) < len(window):
                    raise TaskDataError(
                        f"item {self.id}, trace {trace.name} shows a unit twice in one window"
                    )
            if not trace.windows or trace.windows[-1] != self.window:
                raise TaskDataError(
                    f"item {self.id}, trace {trace.name} does not end in the published window"
                )

    def document(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "id": self.id,
            "source": self.source,
            "task": self.task,
            "units": {name: [dict(part) for part in content] for name, content in self.units.items()},
            "window": list(self.window),
            "live": [[dict(part) for part in content] for content in self.live],
            "question": self.question,
            "choices": list(self.choices),
            "answer": self.answer,
            "max_new_tokens": self.max_new_tokens,
            "meta": dict(self.meta),
            "traces": {trace.name: [list(window) for window in trace.windows] for trace in self.traces},
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Item:
        """The item of a document that `document` wrote."""
        values = dict(document)
        traces = tuple(
            WindowTrace(name, tuple(tuple(window) for window in windows))
            for name, windows in values.pop("traces").items()
        )
        for name in ("window", "live", "choices"):
            values[name] = tuple(values[name])
        return cls(**values, traces=traces)


def _is_visual(content: Sequence[Mapping[str, Any]]) -> bool:
    return any(part.get("type") in ("image", "video") for part in content)
