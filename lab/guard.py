"""Has anything become slower against what stands beside it? ``python -m lab.guard``.

Runs small benchmarks (minutes on two cores) and compares their *ratios*, never a wall time, with those
in guard.json: edits against prefills and against plain copies of the same bytes, taken in the same
rounds. A ratio falls when it is worse than the committed one by more than its tolerance; every fallen
one is printed, and the exit code is 1. ``--update`` writes what was measured as the new reference and
keeps each tolerance. Ratios against a prefill move with the processor: where another machine is the
rule, commit a reference of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lab.results import keep
from lab.speed.machine import commit, machine
from lab.speed.settings import Settings
from lab.speed.table import Result
from lab.speed.timing import Spread

REFERENCE = Path(__file__).with_name("guard.json")
Better = Literal["more", "less"]


@dataclass(frozen=True)
class Ratio:
    """One committed ratio; it may lose ``tolerance`` (a share of it, above 0 and below 1)."""

    value: float
    better: Better
    tolerance: float

    def bound(self) -> float:
        """The worst value that has not fallen."""
        kept = 1 - self.tolerance
        return self.value * kept if self.better == "more" else self.value / kept

    def holds(self, value: float) -> bool:
        """Whether ``value`` is within tolerance; nan is not."""
        return value >= self.bound() if self.better == "more" else value <= self.bound()


@dataclass(frozen=True)
class Run:
    """A benchmark to run, and which of its columns are guarded: which way is better, and the tolerance
    of a ratio that is new."""

    name: str
    settings: Settings
    columns: Mapping[str, tuple[Better, float]]


_FASTER: Mapping[str, tuple[Better, float]] = {"times faster": ("more", 0.5)}
_APPLY: Mapping[str, tuple[Better, float]] = {**_FASTER, "share of copy": ("more", 0.5)}
_SERVE: Mapping[str, tuple[Better, float]] = {"times as long": ("more", 0.3)}
_WINDOW: Mapping[str, tuple[Better, float]] = {
    "times a copy": ("less", 0.5),
    "with the next question": ("less", 0.3),
}

RUNS: tuple[Run, ...] = (
    # where nothing but launching costs
    Run("apply", Settings("tiny", lengths=(256,), rounds=40, min_rounds=20, seconds=5), _FASTER),
    # where bytes cost: few heads in one, a latent in the other
    Run("apply", Settings("qwen2.5-vl-3b", layers=2, lengths=(256, 1024), rounds=5, seconds=15), _APPLY),
    Run("apply", Settings("kimi-vl-a3b", layers=2, lengths=(512,), rounds=5, seconds=15), _APPLY),
    Run("serve", Settings("qwen2.5-vl-3b", layers=2, lengths=(512,), rounds=5, seconds=30), _SERVE),
    Run("window", Settings("qwen2.5-vl-3b", layers=2, lengths=(256,), chunks=(8,), rounds=5), _WINDOW),
)

_WHICH = ("tokens", "chunks")  # numbers that say which row it is; other numbers are figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then compare or update."""
    parser = argparse.ArgumentParser(prog="python -m lab.guard", description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"write {REFERENCE.name} instead of comparing")
    parser.add_argument("--only", choices=sorted({r.name for r in RUNS}), help="run this benchmark alone")
    args = parser.parse_args(arguments)
    found: dict[str, Ratio] = {}
    for run in RUNS:
        if args.only in (None, run.name):
            print(run.settings.command(run.name), file=sys.stderr)
            found |= dict(ratios(measured(run), run))
    held = read(REFERENCE)
    if args.update:
        write(REFERENCE, held if args.only else {}, found, held)
        return 0
    if args.only:
        held = {name: ratio for name, ratio in held.items() if name.startswith(f"{args.only} ")}
    fallen = list(compare(held, found))
    for line in fallen:
        print(line)
    print(f"{len(held) - len(fallen)} of {len(held)} ratios hold")
    return int(bool(fallen))


def measured(run: Run) -> Result:
    """The benchmark under its settings, as ``python -m lab.speed`` runs it."""
    before = torch.get_num_threads()
    torch.set_num_threads(run.settings.threads)
    try:
        result: Result = importlib.import_module(f"lab.speed.{run.name}").run(run.settings)
    finally:
        torch.set_num_threads(before)
    return result


def ratios(result: Result, run: Run) -> Iterator[tuple[str, Ratio]]:
    """Every guarded ratio of a result by a name of its own: benchmark, preset, row, column."""
    for section in result.sections:
        for row in section.rows:
            words = [c for n, c in row.items() if n in _WHICH or (isinstance(c, str) and n != "path")]
            for column, (better, tolerance) in run.columns.items():
                cell = row.get(column)
                if isinstance(cell, Spread):
                    name = " ".join(map(str, [run.name, run.settings.preset, *words]))
                    yield f"{name}: {column}", Ratio(cell.median, better, tolerance)


def compare(held: Mapping[str, Ratio], found: Mapping[str, Ratio]) -> Iterator[str]:
    """One line for every committed ratio that fell, or that nothing measures any more."""
    for name, ratio in held.items():
        if name not in found:
            yield f"gone: {name} (was {ratio.value:.3g}): measure it again, or --update"
        elif not ratio.holds(found[name].value):
            yield (
                f"fell: {name}: {found[name].value:.3g}, was {ratio.value:.3g}, "
                f"may be {ratio.bound():.3g} ({ratio.better} is better)"
            )


def read(path: Path) -> dict[str, Ratio]:
    """The committed ratios."""
    if not path.exists():
        return {}
    held: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))["ratios"]
    return {name: Ratio(**ratio) for name, ratio in held.items()}


def write(
    path: Path, kept: Mapping[str, Ratio], found: Mapping[str, Ratio], held: Mapping[str, Ratio]
) -> None:
    """``kept`` and what was found, with the tolerances that ``held`` had."""
    ratios = {
        **{name: vars(ratio) for name, ratio in kept.items()},
        **{
            name: {
                "value": float(f"{ratio.value:.4g}"),
                "better": ratio.better,
                "tolerance": held[name].tolerance if name in held else ratio.tolerance,
            }
            for name, ratio in found.items()
        },
    }
    document = {"machine": machine(), "commit": commit(), "ratios": ratios}
    keep(document, path)
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
