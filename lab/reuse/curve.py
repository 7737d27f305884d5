"""Acceptance against drift of approximate reuse, with the operating points, drawn from the trials of a sweep.

    python -m lab.reuse.curve RESULTS.json [RESULTS.json …] --plot acceptance.png

The results are those of `lab.reuse.tiers`. A panel per family: the share of the trials that a rule admits,
and the worst drift (KL in nats) among them. *Probe alone* admits by cosine, *guard alone* by the tokens of
equal left context, and an *operating point* is what a calibration for that bound would serve: guard and
threshold together. A family without one has nothing approximate to serve within the bounds tried.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.reuse.sweep import BOUND, Trial, operating_point, windows_of

BOUNDS = (BOUND, 0.2, 0.6, 1.0)
"""Drifts for which an operating point is looked for, in nats; the first is the product's."""

_DPI = 80


@dataclass(frozen=True)
class Admitted:
    """A rule, the share of trials that it admits, the worst drift of these, and their equal answers."""

    rule: str
    accepted: float
    worst: float
    agreement: float


def admitted(trials: Sequence[Trial], rule: str, taken: Sequence[Trial]) -> Admitted:
    """What ``taken`` of ``trials`` are worth. Raises `ValueError` if none is taken."""
    if not taken:
        raise ValueError(f"{rule} admits no trial")
    agree = sum(t.agrees for t in taken) / len(taken)
    return Admitted(rule, len(taken) / len(trials), max(t.kl[-1] for t in taken), agree)


def by_probe(trials: Sequence[Trial]) -> list[Admitted]:
    """Every threshold, the strictest first."""
    cosines = sorted({t.cosine for t in trials}, reverse=True)
    return [admitted(trials, f"cosine {c:.4f}", [t for t in trials if t.cosine >= c]) for c in cosines]


def by_guard(trials: Sequence[Trial]) -> list[Admitted]:
    """Every length of equal left context that occurs, the longest first."""
    lengths = sorted({t.matched for t in trials}, reverse=True)
    return [admitted(trials, f"{w} tokens equal", [t for t in trials if t.matched >= w]) for w in lengths]


def points(trials: Sequence[Trial], bounds: Sequence[float] = BOUNDS) -> dict[float, Admitted]:
    """What a calibration would serve, by bound; bounds without an operating point are left out."""
    found = {}
    for bound in bounds:
        windows = windows_of(trials, bound)
        threshold = operating_point(trials, windows, bound)
        least = windows[-1]
        if threshold is not None and least is not None:
            taken = [t for t in trials if t.matched >= least and t.cosine >= threshold]
            found[bound] = admitted(trials, f"bound {bound} nats", taken)
    return found


def trials_of(family: dict[str, Any]) -> list[Trial]:
    """The trials of one family's result."""
    return [Trial(t["matched"], tuple(t["kl"]), t["cosine"], t["agrees"]) for t in family["trials"]]


def draw(families: Sequence[tuple[str, Sequence[Trial]]], path: Path) -> None:
    """One panel for each family."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(families), 4))
    for axes, (name, trials) in zip(
        figure.subplots(1, len(families), squeeze=False)[0], families, strict=True
    ):
        for label, rows in (("probe alone", by_probe(trials)), ("guard alone", by_guard(trials))):
            axes.plot([r.accepted for r in rows], [r.worst for r in rows], marker=".", label=label)
        chosen = points(trials)
        for bound, row in chosen.items():
            axes.plot(row.accepted, row.worst, "k*", markersize=12, label=f"operating point, bound {bound}")
        axes.axhline(BOUND, color="grey", linestyle=":", label=f"{BOUND} nats")
        title = "" if chosen else "\nno operating point"
        axes.set_title(f"{name}, {len(trials)} trials{title}", fontsize=9)
        axes.set_yscale("log")
        axes.set_xlabel("share of trials accepted")
        axes.set_ylabel("worst drift (nats)")
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)


def main() -> None:
    """Print the operating points, and draw."""
    parser = argparse.ArgumentParser(prog="python -m lab.reuse.curve")
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--plot", type=Path, required=True)
    asked = parser.parse_args()
    found = [f for path in asked.results for f in json.loads(path.read_text(encoding="utf-8"))["families"]]
    families = [(family["family"], trials_of(family)) for family in found]
    for name, trials in families:
        print(name, f"{len(trials)} trials", *points(trials).values() or ["no operating point"], sep="\n  ")
    draw(families, asked.plot)


if __name__ == "__main__":
    main()
