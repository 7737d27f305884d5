"""Seeded windows before a question: what a context went through until it stood as published."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kamera.eval.reuse.item import Item, WindowTrace

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


def with_traces(item: Item, donors: Sequence[str], filler: str, seed: int) -> Item:
    """The item with all traces, each ending in its window.

    ``donors`` are names of other units (as many as the window has, less one, at least), ``filler`` that of
    one that says nothing. Equal seeds and items give equal traces.

    * ``published``: the same window again.
    * ``shuffled``: it stood in another order.
    * ``shifted``: the filler stood before it and left, so that all of it moves.
    * ``slid``: a donor stood before it and left as the last unit came.
    * ``recalled@T``: the last unit left, a share T of the others was replaced, it came back.
    * ``swapped``: one antecedent was another unit.
    * ``contexts``: the last unit stood in two other windows before.
    """
    rng = np.random.default_rng([seed, zlib.crc32(item.id.encode())])
    window = item.window
    *others, last = window
    if len(donors) < len(others):
        raise ValueError(f"item {item.id} has {len(donors)} donors: its window of {len(window)} needs more")
    traces = [
        WindowTrace("published", (window, window)),
        WindowTrace("shuffled", (_shuffled(window, rng), window)),
        WindowTrace("shifted", ((filler, *window), window)),
        WindowTrace("slid", ((_pick(donors, rng), *others), window)),
    ]
    for turnover in TURNOVERS:
        before = _replaced(others, donors, round(turnover * len(others)), rng)
        left = [] if before == tuple(others) else [before]
        traces.append(
            WindowTrace(f"recalled@{turnover:g}", ((*before, last), *left, tuple(others), window)),
        )
    traces.append(WindowTrace("swapped", ((*_replaced(others, donors, 1, rng), last), window)))
    elsewhere = []
    for _ in range(CONTEXTS - 1):
        drawn = rng.permutation([*donors, *others])[: len(others)].tolist()
        elsewhere.append((*drawn, last))
    traces.append(WindowTrace("contexts", (*elsewhere, window)))
    return replace(item, traces=tuple(traces))


def _shuffled(window: Sequence[str], rng: np.random.Generator) -> tuple[str, ...]:
    """Another order: of two units or more there is one."""
    while True:
        order = tuple(window[i] for i in rng.permutation(len(window)))
        if order != tuple(window):
            return order


def _pick(donors: Sequence[str], rng: np.random.Generator) -> str:
    return donors[int(rng.integers(len(donors)))]


def _replaced(
    others: Sequence[str], donors: Sequence[str], count: int, rng: np.random.Generator
) -> tuple[str, ...]:
    """``count`` of the units replaced in place by donors."""
    places = rng.permutation(len(others))[:count]
    drawn = rng.permutation(len(donors))[:count]
    made = list(others)
    for place, donor in zip(places.tolist(), drawn.tolist(), strict=True):
        made[place] = donors[donor]
    return tuple(made)
