"""Items of the benchmark of reuse: a sample, and the windows that its context goes through first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kamera.errors import TaskDataError
from kamera.eval.tasks.sample import Part, Picture, TaskSample

LEAST = 4
"""Visual units that an item's window has at least."""

Windows = tuple[tuple[int, ...], ...]
"""Windows one after another, each of indices into a sample's ``parts`` and then ``others``."""


@dataclass(frozen=True)
class Item:
    """One question of a set, with its ``traces``: windows by name, the last of each the published one.

    So the published answer holds behind each trace, and the exact answer is the same for all. The sample's
    live parts come behind its window, its ``others`` are donors and then the filler. In a frozen benchmark a
    picture's source is a file of its media folder. ``meta`` names the scorer (a ``rule``
    of `ReuseBench`), what that needs beside ``answer`` and ``choices``, and ``max_new_tokens``.
    """

    sample: TaskSample
    traces: Mapping[str, Windows]

    def check(self) -> None:
        """Raise TaskDataError for an item that breaks what is promised above."""
        window, id = context_parts(self.sample), self.sample.id
        if (seen := sum(isinstance(part, Picture) for part in window)) < LEAST:
            raise TaskDataError(f"item {id} shows {seen} visual units: at least {LEAST} belong in a window")
        ends = len(self.sample.parts), len(self.sample.parts) + len(self.sample.others)
        known = {*range(len(window)), *range(*ends)}
        for name, windows in self.traces.items():
            for order in windows:
                if unknown := sorted(set(order) - known):
                    raise TaskDataError(f"item {id}, trace {name}: no unit {unknown[0]!r}")
                if len(set(order)) < len(order):
                    raise TaskDataError(f"item {id}, trace {name} shows a unit twice in one window")
            if not windows or windows[-1] != tuple(range(len(window))):
                raise TaskDataError(f"item {id}, trace {name} does not end in the published window")


def context_parts(sample: TaskSample) -> Sequence[Part]:
    """The published window: the parts that do not arrive with the question."""
    return [part for part in sample.parts if not part.live]
