"""A chunk has left: the paper's removal patch and rank-m refresh against composition and one forward.

    python -m lab.composed.removal [--family gqa deepstack …] [--count 4] [--episodes 12] [--output FOLDER]

Windows of `lab.composed` whose oldest or middle antecedent leaves. Asked are the values that those which stay
bind, and the values the items frame had read from the one that left; what is right is what the window shows
now. η is taken from blind reuse, *won back* from the survivor kept as it is. Arms marked SABOTAGE have to
fail.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kamera import testbed
from kamera.certify.metrics import Items
from kamera.engines.hf import HfEngine
from kamera.ops import KV, apply_patch, deficit, kv_of, patch_of
from kamera.patches.anchor import prefill_anchor
from lab.composed.__main__ import RESAMPLED, backbone_of, orders
from lab.composed.compose import compose
from lab.composed.windows import Pool, TermsOf, Window, library, windows
from lab.paper.document import commit
from lab.paper.draw import HELD_OUT, MANY, RANK, TARGET
from lab.paper.trial import Judged, Trial
from lab.repairs import Keep, NearPatch, RemovalPatch, UpdatedPatch
from lab.results import keep
from lab.speed.machine import machine

TASKS = ("oldest left", "middle left")
COMPOSED = "composed, known"
RANKS = (4, RANK)
STAYS, LEFT = "what stays says", "what left said"


@dataclass(frozen=True)
class Arm:
    """What was answered in one window, and its price.

    ``nbytes`` are those formed for this departure, ``ahead`` and ``serving`` the forwards before it and at
    it, ``windows`` how many windows what was formed ahead serves.
    """

    judged: Judged
    nbytes: float
    ahead: int
    serving: int
    windows: int = 1


@dataclass(frozen=True)
class Left:
    """One window after a departure: its arms, and which of its questions what stays answers."""

    task: str
    episode: int
    stays: npt.NDArray[np.bool_]
    chunk_bytes: int
    arms: Mapping[str, Arm]


def measure(terms: TermsOf, window: Window, other: Window) -> Left:
    """Every arm; ``other`` is another departure from the same old window."""
    stage, old = terms.stage, window.old
    episode = stage.episode
    bound = [q for q in stage.questions(window.order, MANY) if q.hops > 1]
    (gone,) = set(old) - set(window.order)
    read = [
        episode.ask("value", tag, order=(*window.order, TARGET))
        for tag in episode.frames[TARGET].glyph_of
        if gone in episode.ask("value", tag, order=(*old, TARGET)).frames
    ]
    trial = Trial(stage.scene(window.order), [*bound, *read])
    scene = trial.scene
    before = stage.chunks(old)
    known = terms.patch(old)
    pairs = terms.singles_and_pairs(window.order, old)
    swapped = {term: pairs.get(term[::-1]) or terms.patch(term[::-1]) for term in pairs}
    old_patch = trial.judge(NearPatch(RANK, before))
    arms = {
        "one forward": Arm(trial.reprefill, 0, 0, 1),
        "blind": Arm(trial.blind, 0, 0, 0),
        "keep": Arm(trial.judge(Keep(before)), 0, 0, 0),
        "old patch": Arm(old_patch, 0, 0, 0),
    }
    for rank in RANKS:
        own = trial.patched(rank)
        arms[f"its patch@{rank}"] = Arm(own, own.nbytes, 1, 0)
        removed = trial.judge(RemovalPatch(rank, before))
        arms[f"removal patch@{rank}"] = Arm(removed, removed.nbytes - scene.chunk_bytes, 1, 0)
        update = trial.judge(UpdatedPatch(rank, before, old_rank=RANK))
        arms[f"refresh@{rank}"] = Arm(update, update.nbytes - old_patch.nbytes, 1, 0)
    for name, made in (
        (COMPOSED, compose(pairs, window.order, (old, known))),
        ("SABOTAGE swapped", compose(swapped, window.order)),
    ):
        patch = patch_of(kv_of(made.deltas), RANK, scene.dtype).patch
        # terms are formed for no one departure
        price, serves = (library(len(old))[1], orders(len(old))) if name == COMPOSED else (0, 1)
        arms[name] = Arm(trial.judge_kv(scene.patched(patch)), patch.nbytes, price, 0, serves)
    wrong = trial.judge_kv(_removal_of(terms, other, window))
    arms["SABOTAGE other removal"] = Arm(wrong, 0, 0, 0)
    stays = np.arange(len(trial.ids)) < len(bound)
    return Left(window.task, stage.index, stays, scene.chunk_bytes, arms)


def _removal_of(terms: TermsOf, formed: Window, served: Window) -> KV:
    """The removal patch of one departure, served after another."""
    stage = terms.stage
    was, then, now = (stage.scene(order) for order in (formed.old, formed.order, served.order))
    change = deficit(then.conditioned, was.conditioned, then.layout, then.offset_from(was.positions))
    patch = patch_of(change, RANK, then.dtype).patch
    return apply_patch(was.conditioned, patch, now.layout, now.offset_from(was.positions))


def run(backbone: HfEngine, count: int, episodes: int) -> list[Left]:
    """Both departures in every episode."""
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    rows = []
    for index in range(episodes):
        terms = TermsOf(Pool(backbone, anchor, HELD_OUT, index), RANK)
        oldest, middle = (w for w in windows(terms.stage, count) if w.task in TASKS)
        rows += [measure(terms, oldest, middle), measure(terms, middle, oldest)]
    return rows


def summary(rows: Sequence[Left]) -> dict[str, Any]:
    """Every arm over all windows, by what is asked."""
    arms = {}
    for name in rows[0].arms:
        every = [row.arms[name] for row in rows]
        arms[name] = {
            "bytes": float(np.mean([arm.nbytes for arm in every])),
            "share": float(
                np.mean([arm.nbytes / row.chunk_bytes for arm, row in zip(every, rows, strict=True)])
            ),
            "forwards ahead": every[0].ahead,
            "forwards at serving": every[0].serving,
            "windows": every[0].windows,
            STAYS: _answers(rows, name, True),
            LEFT: _answers(rows, name, False),
        }
    return {"windows": len(rows), "arms": arms}


def _answers(rows: Sequence[Left], name: str, stays: bool) -> dict[str, Any]:
    """η and what is won back with the interval that holds 95 % of resamplings of the windows."""

    def sums(arm: str, what: str) -> Items:
        picked = [getattr(row.arms[arm].judged, what)[row.stays == stays] for row in rows]
        return np.array([one.sum() for one in picked])

    n = int(sum((row.stays == stays).sum() for row in rows))
    ours = sums(name, "kl")
    found: dict[str, Any] = {"n": n, "kl": float(ours.sum() / n)}
    found["agreement"] = float(sums(name, "agree").sum() / n)
    found["accuracy"] = float(sums(name, "right").sum() / n)
    drawn = np.random.default_rng(0).integers(0, len(rows), (RESAMPLED, len(rows)))
    for what, base in (("eta", "blind"), ("won back", "keep")):
        floor = sums(base, "kl")
        low, high = np.percentile(1 - ours[drawn].sum(1) / floor[drawn].sum(1), [2.5, 97.5])
        found[what] = [float(1 - ours.sum() / floor.sum()), float(low), float(high)]
    return found


def lines(folder: Path) -> Iterator[str]:
    """Markdown: a table per family measured."""
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        first = next(iter(found["arms"].values()))
        yield (
            f"#### {found['family']}, {found['count']} antecedents, {found['windows']} windows; "
            f"n {first[STAYS]['n']} of what stays, {first[LEFT]['n']} of what left\n"
        )
        heads = (
            *("served", f"η, {STAYS}", "agreement", f"won back of keep, {LEFT}", "agreement", "bytes"),
            *("forwards ahead", "windows they serve", "forwards at serving"),
        )
        yield f"| {' | '.join(heads)} |"
        yield "|" + "---|" * len(heads)
        for name, arm in found["arms"].items():
            stays, left = arm[STAYS], arm[LEFT]
            cells = (
                name.replace("SABOTAGE", "sabotage:"),
                _interval(stays["eta"]),
                f"{stays['agreement']:.3f}",
                _interval(left["won back"]),
                f"{left['agreement']:.3f}",
                f"{arm['bytes'] / 1024:.0f} KiB, {arm['share']:.1%}" if arm["bytes"] else "–",
                str(arm["forwards ahead"]),
                str(arm["windows"]) if arm["forwards ahead"] else "–",
                str(arm["forwards at serving"]),
            )
            yield f"| {' | '.join(cells)} |"
        yield ""


def _interval(value: Sequence[float]) -> str:
    mean, low, high = value
    return f"{mean:.3f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", default=["gqa", "deepstack"])
    parser.add_argument("--count", type=int, choices=(3, 4, 6), default=4)
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    for family in args.family:
        report = {
            "command": f"python -m lab.composed.removal --family {family} --count {args.count} --episodes "
            f"{args.episodes}",
            "commit": commit(),
            "machine": machine(),
            "family": Path(family).name,
            "count": args.count,
            "rank": RANK,
            **summary(run(backbone_of(family), args.count, args.episodes)),
        }
        keep(report, args.output / f"{Path(family).name}.json")
    print("\n".join(lines(args.output)))


if __name__ == "__main__":
    main()
