"""Windows whose company changed, repaired by a few tokens of each chunk: through the product's own windows.

    python -m lab.sampled [--family gqa-unled …] [--count 3 4 6] [--episodes 12] [--world override]
                          [--shares auto 0.25 0.15] [--max-error 0.07] [--rivals 0.15 0.25] [--sound]
                          [--dtype float32|bfloat16] [--output FOLDER]

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
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from kamera import Backbone, ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.certify.metrics import agreement, kl_items
from kamera.ops import KV, Completion, Design, LayerKV, kv_concat, relocate_kv, uniform_offset
from kamera.ops.complete import TurnTables
from kamera.patches.anchor import prefill_anchor
from lab.baselines.cacheblend import SLOPE
from lab.baselines.deviation import deviation, highest
from lab.composed.__main__ import RESAMPLED, backbone_of
from lab.composed.windows import TASKS, WORLDS, Pool, Window, windows
from lab.paper.document import commit
from lab.paper.draw import HELD_OUT, MANY, TARGET
from lab.recompute import recompute
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
    with mock.patch.object(TurnTables, "_turned", lambda self, x, *_, **__: x):
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


def blended(stage: Pool, window: Window, share: float, survivors: bool) -> tuple[list[KV], float]:
    """CacheBlend over a window: of each chunk the tokens that deviate most at the first layer are recomputed.

    From the KV that chunks had in the old window (``survivors``), or from canonicals. The first chunk stands
    on its canonical. Also the tokens that ran, each by the share of the layers that it ran in.
    """
    order, old = (*window.order, TARGET), (*window.old, TARGET)
    shared, layers = stage.scene(window.order)._shared, len(stage.backbone.layout)
    held = dict(zip(old, [step.kv for step in shared.trunk(stage.chunks(old))[1:]], strict=True))
    stood = dict(zip(old, shared.places(stage.chunks(old)), strict=True))
    kvs, ran = [shared.canonical(stage.chunk(order[0])).kv], 0.0
    live = [i for i, spec in enumerate(stage.backbone.layout) if i and spec.channels]
    for frame, place in list(zip(order, shared.places(stage.chunks(order)), strict=True))[1:]:
        alone = shared.canonical(stage.chunk(frame))
        stays = survivors and frame in held
        kv, home = (held[frame], stood[frame]) if stays else (alone.kv, alone.positions)
        offset = uniform_offset(home, place)
        assert offset is not None, "frames of a testbed move as a whole"
        base, tokens = relocate_kv(kv, stage.backbone.layout, offset), place.shape[1]
        counts = {
            layer: min(tokens, round(share * tokens * (1 + SLOPE * (1 - 2 * step / max(1, len(live) - 1)))))
            for step, layer in enumerate(live)
        }
        keep_rows = partial(_deviating, live[0], counts)
        encoded, context = shared.encoded(stage.chunk(frame)), kv_concat([stage.anchor.kv, *kvs])
        made = recompute(stage.backbone, encoded, place, context, base, torch.arange(tokens), keep=keep_rows)
        ran += (tokens * (live[0] + 1) + sum(made.rows[i].numel() for i in live[:-1])) / layers
        kvs.append(made.kv)
    return kvs, ran


def _deviating(
    first: int, counts: dict[int, int], layer: int, rows: torch.Tensor, fresh: LayerKV, held: LayerKV
) -> torch.Tensor:
    if layer < first:
        return rows
    return rows[highest(deviation(fresh, held), min(counts[layer], rows.numel()))]


def rivals(stage: Pool, window: Window, share: float) -> list[Row]:
    """CacheBlend on survivors and on canonicals, asked as the other arms are."""
    trial, rows = stage.trial(window.order, MANY), []
    hops = trial.blind.hops > 1
    chosen = [i for i, hop in enumerate(hops) if hop]
    reference, scene = trial.reference[torch.from_numpy(hops)], trial.scene
    lengths = [stage.chunk(frame).num_tokens for frame in (*window.order, TARGET)]
    for name, survivors in (("survivors", True), ("canonicals", False)):
        kvs, ran = blended(stage, window, share, survivors)
        exact = scene.context
        scene.__dict__["context"] = kv_concat([stage.anchor.kv, *kvs[:-1]])
        try:
            logits = trial.logits(kvs[-1], chosen)
        finally:
            scene.__dict__["context"] = exact
        lost, blind = float(kl_items(logits, reference).sum()), float(trial.blind.kl[hops].sum())
        agreed = float(agreement(logits, reference).sum())
        arm = f"CacheBlend {share:g} on {name}"
        rows.append(Row(window.task, arm, lost, blind, agreed, len(chosen), round(ran), sum(lengths), 0))
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
    backbone: Backbone,
    count: int,
    episodes: int,
    world: str,
    arms: dict[str, tuple[ReusePolicy, str]],
    others: Sequence[float] = (),
) -> list[Row]:
    """Every arm in every window of these episodes."""
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    rows: list[Row] = []
    for index in range(episodes):
        stage = Pool(backbone, anchor, HELD_OUT, index, world=world)
        for window in windows(stage, count):
            rows += measure(backbone, stage, window, arms)
            for share in others:
                rows += rivals(stage, window, share)
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
    parser.add_argument("--rivals", type=float, nargs="*", default=[], help="shares of CacheBlend's")
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
            f"--max-error {args.max_error:g} --dtype {args.dtype}"
            + (f" --rivals {' '.join(map(str, args.rivals))}" if args.rivals else "")
            + (" --sound" if args.sound else ""),
            "commit": commit(),
            "machine": machine(),
            "family": Path(family).name,
            "world": args.world,
            "counts": [],
        }
        for count in args.count:
            tasks = summary(run(backbone, count, args.episodes, args.world, arms, args.rivals))
            report["counts"].append({"count": count, "episodes": args.episodes, "tasks": tasks})
        if args.output is not None:
            varied = [x for x in (args.world, args.dtype) if x not in ("override", "float32")]
            keep(report, args.output / f"{'-'.join([Path(family).name, *varied])}.json")
        print(table(report), flush=True)


def _share(text: str) -> Share:
    return "auto" if text == "auto" else float(text)


if __name__ == "__main__":
    main()
