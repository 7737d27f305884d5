"""Seeded windows before a question: what a context went through until it stood as published."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from kamera.eval.reuse.item import Windows, context_parts
from kamera.eval.tasks.sample import TaskSample

TURNOVERS = (0.0, 0.5, 1.0)
"""Shares of the other units that were replaced while the last one was away."""

TRACES = (
    *("published", "shuffled", "shifted", "slid"),
    *(f"recalled@{turnover:g}" for turnover in TURNOVERS),
    *("swapped", "contexts"),
)
"""Names of the traces."""

CONTEXTS = 3
"""Windows that the last unit stands in, the published one among them."""


def draw_traces(sample: TaskSample, seed: int) -> dict[str, Windows]:
    """All traces of a sample, each ending in its window. Equal seeds and samples give equal traces.

    ``others`` are donors (as many as the window has parts, less one, at least) and then the filler, which
    says nothing.

    * ``published``: the same window again.
    * ``shuffled``: it stood in another order.
    * ``shifted``: the filler stood before it and left, so that all of it moves.
    * ``slid``: a donor stood before it and left as the last unit came.
    * ``recalled@T``: the last unit left, a share T of the others was replaced, it came back.
    * ``swapped``: one antecedent was another unit.
    * ``contexts``: the last unit stood in two other windows before.
    """
    rng = np.random.default_rng([seed, zlib.crc32(sample.id.encode())])
    window = tuple(range(len(context_parts(sample))))
    *donors, filler = range(len(sample.parts), len(sample.parts) + len(sample.others))
    *others, last = window
    if len(donors) < len(others):
        raise ValueError(f"item {sample.id} has {len(donors)} donors: its window of {len(window)} needs more")
    traces: dict[str, Windows] = {
        "published": (window, window),
        "shuffled": (_shuffle(window, rng), window),
        "shifted": ((filler, *window), window),
        "slid": ((donors[int(rng.integers(len(donors)))], *others), window),
    }
    for turnover in TURNOVERS:
        before = _replace(others, donors, round(turnover * len(others)), rng)
        left = [] if before == tuple(others) else [before]
        traces[f"recalled@{turnover:g}"] = ((*before, last), *left, tuple(others), window)
    traces["swapped"] = ((*_replace(others, donors, 1, rng), last), window)
    drawn = [rng.permutation([*donors, *others])[: len(others)].tolist() for _ in range(CONTEXTS - 1)]
    traces["contexts"] = (*((*before, last) for before in drawn), window)
    return traces


def _shuffle(window: Sequence[int], rng: np.random.Generator) -> tuple[int, ...]:
    """Another order: of two units or more there is one."""
    while True:
        order = tuple(window[i] for i in rng.permutation(len(window)))
        if order != tuple(window):
            return order


def _replace(
    others: Sequence[int], donors: Sequence[int], count: int, rng: np.random.Generator
) -> tuple[int, ...]:
    """``count`` of the units replaced in place by donors."""
    places = rng.permutation(len(others))[:count]
    drawn = rng.permutation(len(donors))[:count]
    made = list(others)
    for place, donor in zip(places.tolist(), drawn.tolist(), strict=True):
        made[place] = donors[donor]
    return tuple(made)
