"""Windows whose company changed, repaired by a few tokens of each chunk: through the product's own windows.

    python -m lab.sampled [--family gqa-unled …] [--count 3 4 6] [--episodes 12] [--world override]
                          [--shares auto 0.25 0.15] [--max-error 0.1] [--format table|json] [--output FILE]

Each window is an items frame behind ``count`` frames: in another order, after the oldest or a middle one has
left, or recalled into company that the frames never had. Each chunk is repaired behind repaired ones, all in
one forward. η = 1 − KL(arm ‖ re-prefill) / KL(blind ‖ re-prefill) over multi-hop questions, where blind is
the items frame alone served blind behind exact frames; with the share of the tokens that ran, the agreement
with the re-prefill, and the interval that holds 95 % of resamplings of the windows. Refused samples are
prefilled; they are counted. Arms marked SABOTAGE have to lose.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.certify.metrics import agreement, kl_items
from kamera.ops import Completion, Design
from kamera.ops.complete import Turns
from kamera.patches.anchor import prefill_anchor
from lab.composed.__main__ import RESAMPLED, backbone_of
from lab.composed.windows import TASKS, WORLDS, Pool, Window, windows
from lab.paper.document import commit
from lab.paper.draw import HELD_OUT, MANY, TARGET
from lab.results import keep
from lab.speed.machine import machine

Share = float | Literal["auto"]


@dataclass(frozen=True)
class Row:
    """A window under one arm: sums over its multi-hop questions, and what ran of its chunks' tokens."""

    task: str
    arm: str
    kl: float
    blind: float
    agree: float
    asked: int
    ran: int
    tokens: int
    refused: int


@contextmanager
def another_kernel() -> Iterator[None]:
    """Completes by the kernel of other tokens: each one's is that of a token a third of the chunk away."""
    made = Design.completion

    def wrong(self: Design, count: int, positions: torch.Tensor) -> Completion:
        right = made(self, count, positions)
        return replace(right, columns=right.columns.roll(right.columns.shape[0] // 3, 0))

    with mock.patch.object(Design, "completion", wrong):
        yield


@contextmanager
def random_rows() -> Iterator[None]:
    """Runs tokens drawn at random."""
    made = Design.of

    def wrong(kernel: torch.Tensor) -> Design:
        right = made(kernel)
        order = torch.randperm(kernel.shape[0], generator=torch.Generator().manual_seed(0))[
            : len(right.order)
        ]
        return Design(order, right.open, kernel[:, order])

    with mock.patch.object(Design, "of", wrong):
        yield


@contextmanager
def no_completion() -> Iterator[None]:
    """Leaves the tokens that do not run as they were."""

    def wrong(self: Completion, channel: Any, base: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        out = base.clone()
        out[:, self.rows] = fresh
        return out

    with mock.patch.object(Completion, "completed", wrong):
        yield


@contextmanager
def no_rotation() -> Iterator[None]:
    """Completes phased channels as they stand, no token turned to position 0."""
    with mock.patch.object(Turns, "_turned", lambda self, x, *_, **__: x):
        yield


SABOTAGES: dict[str, Callable[[], Any]] = {
    "another kernel": another_kernel,
    "random rows": random_rows,
    "no completion": no_completion,
    "no rotation": no_rotation,
}


def policy_of(share: Share, max_error: float) -> ReusePolicy:
    """Samples every chunk whose company changed."""
    return ReusePolicy(
        minimum="sampled",
        share=share,
        max_error=max_error,
        on_leave="repair",
        on_miss="prefill",
        certified=False,
        audit=0.0,
    )


def served(backbone: Backbone, stage: Pool, window: Window, policy: ReusePolicy) -> tuple[KameraWindow, Any]:
    """The window after its task under a policy, and the reports of what it took."""
    store, old = ChunkStore.open("memory://"), (*window.old, TARGET)
    kept = KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)
    if window.task == "new company":
        for chunk in stage.chunks((*window.order, TARGET)):
            alone = KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)
            alone.append(chunk, archive="now")
            alone.flush()
        return kept, [kept.append(chunk) for chunk in stage.chunks((*window.order, TARGET))]
    for chunk in stage.chunks(old):
        kept.append(chunk)
    if window.task == "any order":
        return kept, [kept.reorder([old.index(frame) for frame in (*window.order, TARGET)])]
    (gone,) = set(window.old) - set(window.order)
    return kept, [kept.evict(old.index(gone))]


def measure(
    backbone: Backbone, stage: Pool, window: Window, arms: dict[str, tuple[ReusePolicy, str]]
) -> list[Row]:
    """Every arm in one window."""
    trial = stage.trial(window.order, MANY)
    hops = trial.blind.hops > 1
    ids = [i for i, hop in zip(trial.ids, hops, strict=True) if hop]
    reference = trial.reference[torch.from_numpy(hops)]
    blind = float(trial.blind.kl[hops].sum())
    rows = []
    for name, (policy, sabotage) in arms.items():
        with SABOTAGES[sabotage]() if sabotage else nullcontext():
            kept, reports = served(backbone, stage, window, policy)
            logits = torch.stack([kept.next_token_logits(i) for i in ids])
        notes = [note for report in reports for note in report.notes]
        rows.append(
            Row(
                window.task,
                name,
                float(kl_items(logits, reference).sum()),
                blind,
                float(agreement(logits, reference).sum()),
                len(ids),
                sum(report.tokens_recomputed for report in reports),
                sum(slot.length for slot in kept.slots),
                sum(note.startswith("sample refused") for note in notes),
            )
        )
    return rows


def arms_of(shares: Sequence[Share], max_error: float, wrong: bool) -> dict[str, tuple[ReusePolicy, str]]:
    """The policies by arm, and the sabotage that each suffers; without ``wrong`` the sound ones alone."""
    arms = {
        f"sampled {share}": (policy_of(share, max_error if share == "auto" else 1.0), "") for share in shares
    }
    widest = max((share for share in shares if share != "auto"), default=0.25)
    arms |= {f"SABOTAGE {name}": (policy_of(widest, 1.0), name) for name in SABOTAGES if wrong}
    survivors = ReusePolicy(minimum="blind", on_miss="blind", certified=False, tolerance=None)
    return arms | {"survivors or blind": (survivors, "")}


def run(
    backbone: Backbone, count: int, episodes: int, world: str, arms: dict[str, tuple[ReusePolicy, str]]
) -> list[Row]:
    """Every arm in every window of these episodes."""
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    rows: list[Row] = []
    for index in range(episodes):
        stage = Pool(backbone, anchor, HELD_OUT, index, world=world)
        for window in windows(stage, count):
            rows += measure(backbone, stage, window, arms)
    return rows


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """η, agreement, share and refusals by task and arm."""
    tasks: dict[str, Any] = {}
    for task in TASKS:
        tasks[task] = {}
        for arm in dict.fromkeys(row.arm for row in rows):
            picked = [row for row in rows if (row.task, row.arm) == (task, arm)]
            kl, blind = (np.array([getattr(row, what) for row in picked]) for what in ("kl", "blind"))
            drawn = np.random.default_rng(0).integers(0, len(picked), (RESAMPLED, len(picked)))
            low, high = np.percentile(1 - kl[drawn].sum(1) / blind[drawn].sum(1), [2.5, 97.5])
            asked = sum(row.asked for row in picked)
            tasks[task][arm] = {
                "n": asked,
                "eta": float(1 - kl.sum() / blind.sum()),
                "low": float(low),
                "high": float(high),
                "agreement": sum(row.agree for row in picked) / asked,
                "share": sum(row.ran for row in picked) / sum(row.tokens for row in picked),
                "refused": sum(row.refused for row in picked),
                "least": float((1 - kl / np.maximum(blind, 1e-9)).min()),
            }
    return tasks


def table(report: dict[str, Any]) -> str:
    """Tasks side by side, an arm a line: η, agreement, share of the tokens."""
    lines = []
    for found in report["counts"]:
        n = [next(iter(arms.values()))["n"] for arms in found["tasks"].values()]
        lines += [f"{report['family']}, {report['world']}, K = {found['count']}, n = {n}", ""]
        lines += ["| | " + " | ".join(found["tasks"]) + " |", "|---" * (1 + len(found["tasks"])) + "|"]
        for arm in next(iter(found["tasks"].values())):
            cells = [arms[arm] for arms in found["tasks"].values()]
            shown = [f"{c['eta']:.3f}, {c['agreement']:.3f}, {c['share']:.2f}" for c in cells]
            lines.append(f"| {arm} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", default=["gqa-unled", "mla-unled"])
    parser.add_argument("--count", type=int, nargs="+", choices=(3, 4, 6), default=[3, 4, 6])
    parser.add_argument("--episodes", type=int, default=12)
    parser.add_argument("--world", choices=WORLDS, default="override")
    parser.add_argument("--shares", type=_share, nargs="+", default=["auto", 0.25, 0.15])
    parser.add_argument("--max-error", type=float, default=ReusePolicy.max_error)
    parser.add_argument("--sound", action="store_true", help="leave the sabotages out")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--output", type=Path, help="a folder: a JSON file for each family")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for family in args.family:
        backbone, arms = backbone_of(family), arms_of(args.shares, args.max_error, not args.sound)
        if args.dtype != "float32":
            backbone = Backbone(backbone.model.to(getattr(torch, args.dtype)), backbone.processor)
        report = {
            "command": f"python -m lab.sampled --family {family} --count {' '.join(map(str, args.count))} "
            f"--episodes {args.episodes} --world {args.world} --shares {' '.join(map(str, args.shares))} "
            f"--max-error {args.max_error:g} --dtype {args.dtype}",
            "commit": commit(),
            "machine": machine(),
            "family": Path(family).name,
            "world": args.world,
            "counts": [],
        }
        for count in args.count:
            tasks = summary(run(backbone, count, args.episodes, args.world, arms))
            report["counts"].append({"count": count, "episodes": args.episodes, "tasks": tasks})
        if args.output is not None:
            varied = [x for x in (args.world, args.dtype) if x not in ("override", "float32")]
            keep(report, args.output / f"{'-'.join([Path(family).name, *varied])}.json")
        print(table(report), flush=True)


def _share(text: str) -> Share:
    return "auto" if text == "auto" else float(text)


if __name__ == "__main__":
    main()
