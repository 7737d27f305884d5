"""Figures of a benchmark's results, as small PNG files: ``python -m lab.task_plots RESULT.json FOLDER``.

``RESULT.json`` is the output of ``kamera eval TASK … --format json``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kamera.eval.tasks.mm_niah_score import DEPTHS, LABELS
from kamera.eval.tasks.report import ArmResult, Results
from kamera.eval.tasks.sample import Cell, Summary
from kamera.trust import Estimate

CELLS, LENGTHS = "length and depth", "context length (official)"
_DPI = 80
_SHORT = "<1k"


def draw(results: Results, folder: Path) -> list[Path]:
    """Write the figures for which the results have data; returns the files.

    ``arms.png``: every arm's mean with its interval. For MM-NIAH also ``heatmap.png``, scores by context
    length and needle depth, one panel per arm (empty cells had no questions), and ``lengths.png``, the
    official score of every length.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, panels, plot in (
        ("arms", 1 if any(row.summary.n for row in results.arms) else 0, _arms),
        ("heatmap", len([row for row in results.arms if _groups(row, CELLS)]), _heat_maps),
        ("lengths", 1 if any(_groups(row, LENGTHS) for row in results.arms) else 0, _lengths),
    ):
        if panels:
            written.append(folder / f"{name}.png")
            _save(plot, results, panels, written[-1])
    return written


def heat_map(row: ArmResult) -> tuple[tuple[str, ...], list[list[float]]]:
    """Context lengths, and an arm's scores ``[depths][lengths]``, depth 0 first; nan for empty cells."""
    found = {group.label: group.score for group in row.summary.groups if group.by == CELLS}
    columns = tuple(
        length for length in (_SHORT, *LABELS) if any(label.startswith(f"{length},") for label in found)
    )
    depths = [f"depth {i / DEPTHS:.1f}-{(i + 1) / DEPTHS:.1f}" for i in range(DEPTHS)]
    return columns, [[found.get(f"{length}, {d}", math.nan) for length in columns] for d in depths]


def _groups(row: ArmResult, by: str) -> dict[str, float]:
    return {group.label: group.score for group in row.summary.groups if group.by == by}


def _save(plot: Any, results: Results, panels: int, file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * panels + 1.2, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    plot(figure.subplots(1, panels, squeeze=False)[0], results.arms)
    figure.suptitle(f"{results.task}, {results.items} items", fontsize=9)
    figure.savefig(file, dpi=_DPI, metadata={"Software": None})


def _arms(panels: Any, arms: Sequence[ArmResult]) -> None:
    scored = [row for row in arms if row.summary.n]
    means = [row.interval.mean for row in scored]
    reach = [[row.interval.mean - row.interval.low for row in scored]]
    reach.append([row.interval.high - row.interval.mean for row in scored])
    panels[0].bar([row.arm for row in scored], means, yerr=reach, capsize=3, color="C0")
    panels[0].set_ylim(0, 1)
    panels[0].set_ylabel("mean score, 95 % interval")
    panels[0].tick_params(axis="x", labelsize=7)


def _heat_maps(panels: Any, arms: Sequence[ArmResult]) -> None:
    shown = [row for row in arms if _groups(row, CELLS)]
    for panel, row in zip(panels, shown, strict=True):
        lengths, scores = heat_map(row)
        image = panel.imshow(scores, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        panel.set_title(row.arm, fontsize=9)
        panel.set_xticks(range(len(lengths)), lengths, fontsize=7)
        panel.set_yticks(range(DEPTHS), [f"{i / DEPTHS:.1f}" for i in range(DEPTHS)], fontsize=7)
        panel.set_xlabel("context length, tokens", fontsize=8)
        for y, line in enumerate(scores):
            for x, score in enumerate(line):
                if not math.isnan(score):
                    panel.text(x, y, f"{score:.2f}", ha="center", va="center", fontsize=6)
    panels[0].set_ylabel("needle depth, from", fontsize=8)
    panels[0].figure.colorbar(image, ax=list(panels))


def _lengths(panels: Any, arms: Sequence[ArmResult]) -> None:
    for row in arms:
        scores = _groups(row, LENGTHS)
        panels[0].plot(list(scores), list(scores.values()), marker=".", label=row.arm)
    panels[0].set_ylim(-0.02, 1.02)
    panels[0].set_xlabel("context length, tokens")
    panels[0].set_ylabel("official score")
    panels[0].legend(fontsize=7)
    panels[0].grid(alpha=0.3)


def read_results(document: Mapping[str, Any]) -> Results:
    """The results in a document that ``kamera eval`` wrote; null stands for nan."""
    arms = []
    for row in map(_with_nan, document["arms"]):
        groups = tuple(Cell(**_with_nan(cell)) for cell in row["summary"]["groups"])
        row["summary"] = Summary(**{**_with_nan(row["summary"]), "groups": groups})
        row["interval"] = Estimate(**_with_nan(row["interval"]))
        arms.append(ArmResult(**row))
    return Results(document["task"], document["items"], document["labelled"], tuple(arms), (), ())


def _with_nan(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in told.items()}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m lab.task_plots RESULT.json FOLDER")
    told = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(*draw(read_results(told), Path(sys.argv[2])), sep="\n")
