"""Plots of a result as small PNG files. Needs matplotlib: ``pip install "kamera[plots]"``."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

_DPI = 80


def _drawable(path: Path | None) -> Path | None:
    if path is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter('plots need matplotlib: pip install "kamera[plots]", or leave --plot out')
    if not path.parent.is_dir():
        raise typer.BadParameter(f"no folder {str(path.parent)!r}: make it first")
    return path


Plot = Annotated[
    Path | None,
    typer.Option("--plot", dir_okay=False, callback=_drawable, help="Draw the result into this PNG file."),
]


def chart(
    path: Path | None,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    label: str,
    *,
    stacked: bool = False,
) -> None:
    """Horizontal bars of ``series`` for each name, side by side or stacked; nothing without a path."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.3 * len(names) * (1 if stacked else max(1, len(series)))))
    axes = figure.subplots()
    base = [0.0] * len(names)
    height = 0.8 if stacked else 0.8 / max(1, len(series))
    for number, (name, values) in enumerate(series.items()):
        shift = 0.0 if stacked else number * height
        axes.barh(
            [i + shift for i in range(len(names))], values, height, left=base if stacked else 0.0, label=name
        )
        if stacked:
            base = [b + v for b, v in zip(base, values, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)


def curve(
    path: Path | None,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    labels: tuple[str, str],
    mark: tuple[float, str] | None = None,
) -> None:
    """Lines of ``series`` over ``x``, with a vertical line at ``mark``; nothing without a path."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    for name, values in series.items():
        axes.plot(x, values, marker=".", label=name)
    if mark is not None:
        axes.axvline(mark[0], color="black", linestyle="--", label=mark[1])
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
