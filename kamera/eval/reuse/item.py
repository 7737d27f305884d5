"""Items of the benchmark of reuse: units, windows over time, and a question behind the last of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kamera.errors import TaskDataError
from kamera.eval.tasks.sample import Passage, Picture

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

    ``units`` are texts and pictures by name; in a frozen benchmark a picture's source is a file of its media
    folder. ``window`` is the published order; every trace ends in it, so the
    published ``answer`` holds for each, and the exact answer is the same for all. ``live`` arrives with the
    ``question`` text (pictures among the choices). ``meta`` names the scorer (``rule``,
    `kamera.eval.reuse.scoring`) and what it needs beside ``answer`` and ``choices``.
    """

    id: str
    source: str
    task: str
    units: Mapping[str, Passage | Picture]
    window: tuple[str, ...]
    question: str
    answer: Any
    meta: Mapping[str, Any]
    live: tuple[Passage | Picture, ...] = ()
    choices: tuple[str, ...] = ()
    max_new_tokens: int = 16
    traces: tuple[WindowTrace, ...] = ()

    def check(self) -> None:
        """Raise TaskDataError for an item that breaks what is promised above."""
        if (seen := sum(isinstance(self.units.get(name), Picture) for name in self.window)) < LEAST:
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
            "units": {name: _content(part) for name, part in self.units.items()},
            "window": list(self.window),
            "live": [_content(part) for part in self.live],
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
        values["units"] = {name: _part(content) for name, content in values["units"].items()}
        values["live"] = tuple(_part(content, live=True) for content in values["live"])
        values |= {name: tuple(values[name]) for name in ("window", "choices")}
        return cls(**values, traces=traces)


def _content(part: Passage | Picture) -> list[dict[str, Any]]:
    """A unit as chat content."""
    if isinstance(part, Passage):
        return [{"type": "text", "text": part.text}]
    caption = [{"type": "text", "text": part.caption}] if part.caption else []
    return [{"type": "image", "image": part.source}, *caption]


def _part(content: Sequence[Mapping[str, Any]], live: bool = False) -> Passage | Picture:
    """The unit of chat content: a text, or a picture with the text that moves with it."""
    text = "".join(part["text"] for part in content if part["type"] == "text")
    pictures = [part["image"] for part in content if part["type"] == "image"]
    return Picture(pictures[0], live, text) if pictures else Passage(text, live)
