"""What a context went through before a question: samples behind windows that all end in the published one."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kamera.eval.tasks.sample import Part, Passage, TaskSample

LEAST = 3
"""Pictures or clips that a context has at least."""

TURNOVERS = (0.0, 0.5, 1.0)
"""Shares of the other units that were replaced while the last one was away."""

CONTEXTS = 3
"""Windows that the last unit stands in, the published one among them."""

TRACES = (
    *("published", "shuffled", "shifted", "slid"),
    *(f"recalled@{turnover:g}" for turnover in TURNOVERS),
    *("swapped", "contexts"),
)
"""Names of the traces."""

Window = tuple[int, ...]

_NOTHING = Passage("This line says nothing about what comes below it.\n" * 8)


def traces_named(names: Sequence[str]) -> tuple[str, ...]:
    """Traces by name, ``all`` for all. Raises ValueError for an unknown name."""
    if unknown := sorted(set(names) - {*TRACES, "all"}):
        raise ValueError(f"trace {unknown[0]!r} is none of {', '.join(TRACES)}, all")
    return TRACES if "all" in names else tuple(names)


def traced(sample: TaskSample, names: Sequence[str]) -> Iterator[TaskSample]:
    """The sample behind the traces of these ``names``; nothing if its context shows too little (`LEAST`).

    A unit is a picture or clip of the context with the text that follows it. The windows before the published
    one hold its units and *twins* of them, whose colours are exchanged: foreign content of the same size.
    Equal samples have equal traces.

    * ``published``: the same window again.
    * ``shuffled``: it stood in another order.
    * ``shifted``: a text that says nothing stood before it and left, so that all of it moves.
    * ``slid``: a twin stood before it and left as the last unit came.
    * ``recalled@T``: the last unit left, a share T of the others was replaced by twins, it came back.
    * ``swapped``: one antecedent was a twin.
    * ``contexts``: the last unit stood in two other windows before.
    """
    units = _units(sample)
    seen = [unit for unit in units if not isinstance(sample.parts[unit[0]], Passage)]
    if len(seen) < LEAST:
        return
    others, twins = list[Part](), list[Window]()
    for unit in seen if seen[-1] != units[-1] else seen[:-1]:
        start = len(sample.parts) + len(others)
        twins.append(tuple(range(start, start + len(unit))))
        parts = [sample.parts[i] for i in unit]
        others += [part if isinstance(part, Passage) else replace(part, twin=True) for part in parts]
    places = [*units, *twins, (len(sample.parts) + len(others),)]
    rng = np.random.default_rng(zlib.crc32(sample.id.encode()))
    for name, before in _histories(len(units), len(twins), rng):
        if name in names:
            yield replace(
                sample,
                id=f"{sample.id}/{name}",
                meta={**sample.meta, "item": sample.id, "trace": name},
                others=(*others, _NOTHING),
                before=tuple(tuple(i for unit in window for i in places[unit]) for window in before),
            )


def _units(sample: TaskSample) -> list[Window]:
    """Indices of the context's parts: each picture or clip, and the text up to the next one."""
    units: list[Window] = []
    for i, part in enumerate(sample.parts):
        if part.live:
            continue
        if isinstance(part, Passage) and units:
            units[-1] += (i,)
        else:
            units.append((i,))
    return units


def _histories(size: int, foreign: int, rng: np.random.Generator) -> Iterator[tuple[str, list[Window]]]:
    """The windows before the published one, by trace.

    Units are numbers: those of the published window, then its ``foreign`` twins, then the filler.
    """
    window = tuple(range(size))
    *others, last = window
    twins, filler = list(range(size, size + foreign)), size + foreign
    yield "published", [window]
    yield "shuffled", [_shuffled(window, rng)]
    yield "shifted", [(filler, *window)]
    yield "slid", [(twins[int(rng.integers(len(twins)))], *others)]
    for turnover in TURNOVERS:
        before = _replaced(others, twins, round(turnover * len(others)), rng)
        left = [] if before == tuple(others) else [before]
        yield f"recalled@{turnover:g}", [(*before, last), *left, tuple(others)]
    yield "swapped", [(*_replaced(others, twins, 1, rng), last)]
    drawn = [rng.permutation([*twins, *others])[: len(others)].tolist() for _ in range(CONTEXTS - 1)]
    yield "contexts", [(*units, last) for units in drawn]


def _shuffled(window: Window, rng: np.random.Generator) -> Window:
    """Another order: of two units or more there is one."""
    while True:
        order = tuple(window[i] for i in rng.permutation(len(window)))
        if order != window:
            return order


def _replaced(others: Sequence[int], twins: Sequence[int], count: int, rng: np.random.Generator) -> Window:
    """``count`` of the units, as far as there are twins, replaced by them in place."""
    places = rng.permutation(len(others))[:count]
    drawn = rng.permutation(len(twins))[:count]
    made = list(others)
    for place, twin in zip(places.tolist(), drawn.tolist(), strict=False):
        made[place] = twins[twin]
    return tuple(made)
