"""How well do singles and ordered pairs compose into a patch nobody formed?

    python -m lab.composed [--family gqa|mla|mha|deepstack|DIR] [--count 3 4 6] [--episodes 12]
                           [--world override] [--rank 16] [--format table|json] [--output FILE]

Per task (any order; the oldest, one in the middle has left; recalled into new company) and arm: η over the
multi-hop questions, 1 − KL(arm) / KL(blind), with the interval that holds 95 % of resamplings of the
episodes, and accuracy. Arms marked SABOTAGE have to fail. Below: what composition says of itself, against
what it loses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kamera import Backbone, testbed
from kamera.certify.metrics import Items
from kamera.engines.hf import HfEngine
from kamera.patches.anchor import prefill_anchor
from lab.composed.windows import WORLDS, Pool, Row, TermsOf, library, measure, served, windows
from lab.paper.document import commit
from lab.paper.draw import HELD_OUT
from lab.speed.machine import machine
from lab.testbed import BACKBONES, load

RESAMPLED = 2000
KEPT = (1.0, 0.9, 0.8, 0.5)


def backbone_of(family: str) -> HfEngine:
    """A family of the laboratory, or any model directory."""
    if family in BACKBONES:
        return HfEngine(*load(family))
    return Backbone.from_pretrained(family, dtype="float32").engine


def run(backbone: HfEngine, count: int, episodes: int, world: str, rank: int) -> list[Row]:
    """Every window of these episodes; one episode's terms are the next one's sabotage."""
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    rows: list[Row] = []
    before: TermsOf | None = None
    for index in range(episodes):
        terms = TermsOf(Pool(backbone, anchor, HELD_OUT, index, world=world), rank)
        rows += [measure(terms, window, before) for window in windows(terms.stage, count)]
        before = terms
    return rows


def summary(rows: Sequence[Row], count: int) -> dict[str, Any]:
    """η and accuracy by task and arm, the price of the terms, and how far doubt foretells loss."""
    tasks: dict[str, Any] = {}
    for task in dict.fromkeys(row.task for row in rows):
        asked = [row for row in rows if row.task == task]
        items = sum(row.items for row in asked)
        names = [n for n in asked[-1].arms]
        tasks[task] = {"items": items, "arms": {name: _arm(asked, name) for name in names}}
    terms, forwards = library(count)
    return {
        "count": count,
        "episodes": len({row.episode for row in rows}),
        "tasks": tasks,
        "library": {"terms": terms, "forwards": forwards, "orders": orders(count)},
        "doubt": {name: _foretold(rows, name, count) for name in ("doubt", "missed")},
    }


def _arm(rows: Sequence[Row], name: str) -> dict[str, float]:
    rows = [row for row in rows if name in row.arms]
    kl = np.array([row.arms[name].kl for row in rows])
    blind = np.array([row.arms["blind"].kl for row in rows])
    items = sum(row.items for row in rows)
    drawn = np.random.default_rng(0).integers(0, len(rows), (RESAMPLED, len(rows)))
    low, high = np.percentile(1 - kl[drawn].sum(1) / blind[drawn].sum(1), [2.5, 97.5])
    return {
        "eta": float(1 - kl.sum() / blind.sum()),
        "low": float(low),
        "high": float(high),
        "accuracy": sum(row.arms[name].right for row in rows) / items,
        "agreement": sum(row.arms[name].agree for row in rows) / items,
    }


def _foretold(rows: Sequence[Row], sign: str, count: int) -> dict[str, Any]:
    """Rank correlation of a sign with what was lost per window, and η of the share it trusts most."""
    said = np.array([getattr(row, sign) for row in rows])
    kl = np.array([row.arms[served(row.task, count)].kl for row in rows])
    blind = np.array([row.arms["blind"].kl for row in rows])
    order = np.argsort(said, kind="stable")
    kept = {}
    for share in KEPT:
        chosen = order[: max(1, round(share * len(rows)))]
        kept[f"{share:.0%}"] = {
            "up to": float(said[chosen].max()),
            "eta": float(1 - kl[chosen].sum() / blind[chosen].sum()),
            "worst": float((1 - kl[chosen] / np.maximum(blind[chosen], 1e-9)).min()),
        }
    return {"rank correlation": _spearman(said, kl / np.maximum(blind, 1e-9)), "kept": kept}


def _spearman(a: Items, b: Items) -> float:
    x, y = (np.argsort(np.argsort(v, kind="stable"), kind="stable") - (len(v) - 1) / 2 for v in (a, b))
    return float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))


def orders(count: int) -> int:
    """Orders of all subsets that the terms serve."""
    total, each = 0, 1
    for taken in range(count):
        each *= count - taken
        total += each
    return total


def table(found: dict[str, Any]) -> str:
    """Tasks side by side, an arm a line."""
    tasks = found["tasks"]
    lines = [f"K = {found['count']}, {found['episodes']} episodes"]
    lines.append(" " * 20 + "".join(f"{task:>26}" for task in tasks))
    for name in next(iter(tasks.values()))["arms"]:
        cells = [arms["arms"].get(name) for arms in tasks.values()]
        shown = [f"{c['eta']:.3f} [{c['low']:.2f}, {c['high']:.2f}] {c['accuracy']:.2f}" for c in cells if c]
        lines.append(f"{name:20}" + "".join(f"{cell:>26}" for cell in shown))
    for sign, told in found["doubt"].items():
        kept = ", ".join(f"{k}: η {v['eta']:.3f} (≤ {v['up to']:.3f})" for k, v in told["kept"].items())
        lines.append(f"{sign}: rank correlation {told['rank correlation']:.2f}; {kept}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="gqa")
    parser.add_argument("--count", type=int, nargs="+", choices=(3, 4, 6), default=[3, 4, 6])
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--world", choices=WORLDS, default="override")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    backbone = backbone_of(args.family)
    found = []
    for count in args.count:
        found.append(summary(run(backbone, count, args.episodes, args.world, args.rank), count))
        if args.output is None and args.format == "table":
            print(table(found[-1]), flush=True)
    counts = " ".join(map(str, args.count))
    report = {
        "command": f"python -m lab.composed --family {args.family} --count {counts} --episodes "
        f"{args.episodes} --world {args.world} --rank {args.rank}",
        "commit": commit(),
        "machine": machine(),
        "family": args.family,
        "world": args.world,
        "rank": args.rank,
        "counts": found,
    }
    if args.output is not None:
        text = json.dumps(report, indent=1) if args.format == "json" else "\n".join(map(table, found))
        args.output.write_text(text + "\n", encoding="utf-8")
    elif args.format == "json":
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
