"""``python -m lab.speed growth``: the cost of one operation as the window and the store grow.

A window operation that moves nothing should cost the same in a long window; one that moves keys or KV
grows with the bytes it moves and no faster. Where the time goes in the longest window is told by a
profile, step by step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

from kamera import ChunkStore
from lab.speed.lookups import LOOKUPS, fill, lookups
from lab.speed.moves import Deck
from lab.speed.presets import preset
from lab.speed.profile import profiled
from lab.speed.settings import Settings, Step, unwatched
from lab.speed.stock import Stock
from lab.speed.table import Result, Row, Section, model_facts, result
from lab.speed.timing import Spread, measure

WINDOWS, STORES = "Window operations, ms", "Store look-ups, p50 ms"
"""Titles of the sections that are drawn."""
PROFILED = ("recall", "slide")
STEPS = 8
"""Steps of a profile that are shown."""

NOTES = (
    "grows as: the exponent that fits the medians by least squares; 0 is flat, 1 proportional to the size",
    "profiles: a step is a function of Kamera with what it calls outside of it, under the profiler",
)


def run(settings: Settings, step: Step = unwatched) -> Result:
    """Measure windows of ``chunks`` chunks of the first length, and stores of ``stored`` chunks."""
    chosen = preset(settings.preset)
    backbone = settings.build(chosen)
    total = len(settings.chunks) + len(settings.stored)
    stock = Stock(backbone, chosen, ChunkStore.open("memory://", memory_limit="16GiB"), settings.lengths[0])
    windows: list[Row] = []
    for done, chunks in enumerate(sorted(settings.chunks)):
        step(done, total)
        deck = Deck(stock, chunks)
        windows += window_rows(deck, settings)
        assert deck.forwards == 0, f"{deck.forwards} forwards in moves that are promised to run none"
    profiles = [profile(deck, name) for name in PROFILED]
    stores: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kamera-growth-") as folder:
        held = 0
        for done, count in enumerate(sorted(settings.stored), len(settings.chunks)):
            step(done, total)
            fill(Path(folder) / "store", held, count)
            stores += lookups(Path(folder) / "store", count, LOOKUPS * settings.rounds)
            held = count
    step(total, total)
    sections = [
        Section(WINDOWS, tuple(pivot(windows, "operation", "chunks", "ms"))),
        Section(STORES, tuple(pivot(stores, "look-up", "chunks", "p50 ms"))),
        Section("Store look-ups, p99 ms", tuple(pivot(stores, "look-up", "chunks", "p99 ms"))),
        *profiles,
    ]
    return result("growth", settings, model_facts(chosen, backbone), sections, NOTES)


def window_rows(deck: Deck, settings: Settings) -> list[Row]:
    """Milliseconds of every move of a deck."""
    moves = deck.moves()
    timed = measure(
        [deck.arm(move) for move in moves],
        settings.device,
        rounds=settings.rounds,
        min_rounds=settings.min_rounds,
        seconds=settings.seconds,
    )
    return [
        {"operation": move.name, "chunks": deck.chunks, "ms": timed.spread(move.name).times(1e3)}
        for move in moves
    ]


def pivot(rows: Sequence[Row], name: str, size: str, figure: str) -> list[Row]:
    """A row per ``name``: its figure at every size, how much more that is at the last, and as what power."""
    out: dict[Any, dict[str, Any]] = {}
    for row in rows:
        out.setdefault(row[name], {name: row[name]})[str(row[size])] = row[figure]
    for cells in out.values():
        points = {int(n): _middle(v) for n, v in cells.items() if n != name}
        first, last = min(points), max(points)
        if first < last:
            cells[f"at {last / first:.0f} times the size"] = points[last] / points[first]
            cells["grows as"] = exponent(points)
    return list(out.values())


def exponent(points: Mapping[int, float]) -> float:
    """The slope of log figure over log size, by least squares. At least two sizes."""
    at = [log(n) for n in points]
    values = [log(v) for v in points.values()]
    middle, mean = sum(at) / len(at), sum(values) / len(values)
    along = sum((x - middle) * (y - mean) for x, y in zip(at, values, strict=True))
    return along / sum((x - middle) ** 2 for x in at)


def profile(deck: Deck, name: str) -> Section:
    """Where one move spends its time."""
    move = next(m for m in deck.moves() if m.name == name)

    def before() -> Callable[[], object]:
        deck.ready(deck.chunks + move.start)
        return move.prepare(deck)

    rows = profiled(before, STEPS)
    return Section(f"Where {name} spends its time in a window of {deck.chunks} chunks", tuple(rows))


def _middle(value: float | Spread) -> float:
    return value.median if isinstance(value, Spread) else value
