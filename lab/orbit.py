"""How few orderings stand for all of them in an orbit patch?

    python -m lab.orbit [--episodes 24] [--family gqa] [--count 4] [--format json] [--output FILE]

The patch of an items frame is formed from the mean deficit over several sets of orderings of what stands
before it, and served behind orderings drawn from all there are. Per set: the forwards it takes (of the
target, and of antecedents, prefixes in common once and the leading chunk as its canonical), and η over the
multi-hop questions, 1 − KL(set) / KL(blind reuse). Differences to the orbit over every ordering are given
with the interval that holds 95 % of resamplings of the episodes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kamera import testbed
from kamera.engines.hf import HfEngine
from kamera.ops import mean_deficit, patch_of
from kamera.patches.anchor import prefill_anchor
from kamera.patches.orbit import balanced_orderings, orderings
from lab.paper.draw import HELD_OUT, RANK, Stage
from lab.speed.machine import machine
from lab.testbed import load

SERVED = 4
"""Orderings served in an episode."""

RESAMPLED = 2000

Orders = Sequence[tuple[int, ...]]
Sums = dict[str, float]


def sets(count: int) -> Mapping[str, Orders]:
    """What is averaged, by name; the first ordering of the smaller sets is the one that was given."""
    given = tuple(range(count))
    return {
        "every": list(itertools.permutations(given)),
        "balanced": balanced_orderings(count),
        "there and back": orderings(count, 2, 0),
        "rotations": [given[i:] + given[:i] for i in range(count)],
        "the given one": [given],
    }


def forwards(orders: Orders) -> tuple[int, int]:
    """Forwards of the target and of antecedents that an orbit over ``orders`` takes."""
    beginnings = {order[:end] for order in orders for end in range(2, len(order) + 1)}
    return len(orders), len(beginnings)


def run(episodes: int, family: str, count: int) -> list[Sums]:
    """Per episode: the KL of every arm summed over its questions, and their number."""
    backbone = HfEngine(*load(family))
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    rows = []
    for index in range(episodes):
        stage = Stage(backbone, anchor, HELD_OUT, index)
        every = sets(count)["every"]
        deltas = {order: stage.scene(order).delta for order in every}
        means = {name: mean_deficit(deltas[o] for o in orders) for name, orders in sets(count).items()}
        patches = {
            name: patch_of(mean, RANK, stage.scene(every[0]).dtype).patch for name, mean in means.items()
        }
        row: Sums = dict.fromkeys(("items", "blind", "own", "others", *patches), 0.0)
        for served in (every[i] for i in stage.rng(count).permutation(len(every))[:SERVED]):
            trial = stage.trial(served)
            scene, asked = trial.scene, trial.blind.hops > 1
            rest = mean_deficit(deltas[o] for o in every if o != served)
            arms = {
                **patches,
                "own": scene.patch.truncate(RANK),
                "others": patch_of(rest, RANK, scene.dtype).patch,
                "blind": None,
            }
            for name, patch in arms.items():
                row[name] += float(trial.judge_kv(scene.patched(patch)).kl[asked].sum())
            row["items"] += int(asked.sum())
        rows.append(row)
    return rows


def summary(rows: Sequence[Sums], count: int) -> dict[str, Any]:
    """η by arm, and against "every"."""
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, len(rows), (RESAMPLED, len(rows)))
    sums = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    eta = {name: 1 - kl.sum() / sums["blind"].sum() for name, kl in sums.items() if name != "items"}
    spread = {name: 1 - kl[drawn].sum(1) / sums["blind"][drawn].sum(1) for name, kl in sums.items()}
    arms = {}
    for name, value in eta.items():
        low, high = np.percentile(spread[name] - spread["every"], [2.5, 97.5])
        arms[name] = {"eta": value, "less": value - eta["every"], "low": low, "high": high}
        if name in sets(count):
            arms[name]["target"], arms[name]["antecedents"] = forwards(sets(count)[name])
    return {"episodes": len(rows), "items": int(sums["items"].sum()), "count": count, "arms": arms}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--family", default="gqa")
    parser.add_argument("--count", type=int, choices=(3, 4), default=4)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = run(args.episodes, args.family, args.count)
    found = {"machine": machine(), "family": args.family, **summary(rows, args.count)}
    lines = [f"{found['items']} questions in {found['episodes']} episodes, {args.count} antecedents"]
    for name, arm in found["arms"].items():
        price = f"{arm['target']} + {arm['antecedents']} forwards" if "target" in arm else ""
        apart = f"{arm['less']:+.3f} [{arm['low']:+.3f}, {arm['high']:+.3f}]"
        lines.append(f"{name:16} η {arm['eta']:6.3f}   {apart}   {price}".rstrip())
    text = json.dumps(found, indent=1) if args.format == "json" else "\n".join(lines)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
