"""Has anything become slower against what stands beside it? Ratios of one run, never wall times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import circumstances
from benchmarks.report import Row, progress
from benchmarks.speed.measured import Settings, apply, serve, window

REFERENCE = Path(__file__).with_name("guard.json")
TOLERANCE = 0.5
"""The share of a ratio that it may lose: machines differ."""

RUNS: Mapping[str, tuple[Callable[[Settings], Iterator[Row]], Settings, tuple[str, ...]]] = {
    # where bytes cost
    "apply": (apply, Settings(lengths=(256,), rounds=5, seconds=10), ("times faster", "share of copy")),
    # where nothing but launching costs
    "launches": (apply, Settings("tiny", lengths=(256,), seconds=5), ("times faster",)),
    "serve": (serve, Settings("tiny", lengths=(256,), seconds=5), ("times as long",)),
    "window": (window, Settings("tiny", lengths=(256,), chunks=4, seconds=5), ("times faster",)),
}
"""What runs, and its columns: of all, more is better."""


def run(update: bool) -> tuple[list[Row], bool]:
    """A row for each ratio, and whether one fell; ``update`` writes them as the new reference."""
    found = dict(ratios())
    held: Mapping[str, float] = json.loads(REFERENCE.read_text(encoding="utf-8"))["ratios"]
    if update:
        document: dict[str, Any] = {**circumstances(), "ratios": found}
        REFERENCE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        held = found
    return compare(held, found)


def compare(held: Mapping[str, float], found: Mapping[str, float]) -> tuple[list[Row], bool]:
    """A row for each committed ratio; it fell if nothing measures it any more, too."""
    rows: list[Row] = [
        {
            "ratio": name,
            "committed": was,
            "may be": was * (1 - TOLERANCE),
            "is": found.get(name),
            "holds": found.get(name, 0.0) >= was * (1 - TOLERANCE),
        }
        for name, was in held.items()
    ]
    return rows, not all(row["holds"] for row in rows)


def ratios() -> Iterator[tuple[str, float]]:
    """Every guarded ratio by a name of its own: run, row, column."""
    for name, (measured, settings, columns) in RUNS.items():
        progress(name)
        for row in measured(settings):
            if row.get("way") == "question alone":  # it is Kamera's own, too
                continue
            words = [str(row[part]) for part in ("way", "operation") if part in row]
            for column in columns:
                if row.get(column) is not None:
                    yield f"{name}: {', '.join(words)}: {column}", float(f"{row[column][0]:.4g}")
