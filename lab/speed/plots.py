"""The growth curves of a result, as one small file. Needs matplotlib: ``pip install "kamera[plots]"``.

``python -m lab.speed.plots growth.json growth.svg``
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.speed.growth import STORES, WINDOWS

_SIZE = (11.0, 4.0)
_HASH = "kamera"  # ids in the file, the same every time


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Write the curves of a growth result (its JSON document) to ``path``, an SVG or PNG file.

    Raises ImportError without matplotlib, ValueError for a document that is no growth result.
    """
    if document.get("benchmark") != "growth":
        raise ValueError(f"{document.get('benchmark')!r} is no result of the growth benchmark")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sections = {section["title"]: section["rows"] for section in document["sections"]}
    figure = Figure(figsize=_SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _curves(left, sections[WINDOWS], "operation")
    left.set_xlabel(f"chunks of {document['settings']['lengths'][0]} tokens in the window")
    _curves(right, sections[STORES], "look-up")
    right.set_xlabel("chunks in the store")
    with matplotlib.rc_context({"svg.hashsalt": _HASH, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def points(row: Mapping[str, Any]) -> list[tuple[int, float, float, float]]:
    """Size, median, and the middle half of a row's figures, by size."""
    found = []
    for name, cell in row.items():
        if name.isdigit():
            spread = cell if isinstance(cell, Mapping) else {"median": cell, "low": cell, "high": cell}
            found.append((int(name), spread["median"], spread["low"], spread["high"]))
    return sorted(found)


def _curves(panel: Any, rows: Sequence[Mapping[str, Any]], name: str) -> None:
    panel.set_xscale("log")
    panel.set_yscale("log")
    for row in rows:
        at, middle, low, high = zip(*points(row), strict=True)
        (line,) = panel.plot(at, middle, marker="o", markersize=3, label=row[name])
        panel.fill_between(at, low, high, alpha=0.15, color=line.get_color())
    panel.set_xticks(at, [f"{n:,}" for n in at])
    panel.set_xticks([], minor=True)
    panel.set_ylabel("ms, median")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m lab.speed.plots RESULT.json PLOT.svg")
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
