"""Windows whose company changed, repaired by a few tokens of each chunk: through the product's own windows.

    python -m lab.sampled [--family gqa-unled …] [--count 3 4 6] [--episodes 12] [--world override]
                          [--tokens 64|256|1444] [--tasks "oldest left" …] [--shares auto 0.25 0.15]
                          [--max-error 0.07] [--rivals 0.15 0.25] [--sound] [--dtype float32|bfloat16]
                          [--output FOLDER]

Each window is an items frame behind ``count`` frames: in another order, after the oldest or a middle one has
left, or recalled into company that the frames never had. Each chunk is repaired behind repaired ones, all in
one forward. η = 1 − KL(arm ‖ re-prefill) / KL(blind ‖ re-prefill) over multi-hop questions, where blind is
the items frame alone served blind behind exact frames; with the agreement with the re-prefill, the share of
right answers, that of the tokens that ran, and the interval that holds 95 % of resamplings of the windows.
Refused samples are prefilled; they are counted. Arms marked SABOTAGE have to lose.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.certify.metrics import kl_items
from kamera.content import Chunk
from kamera.engines.hf import HfEngine
from kamera.ops import Completion, Design, kv_concat
from kamera.ops.complete import TurnTables
from kamera.patches.anchor import prefill_anchor
from kamera.window import sampling
from lab.blended import blended
from lab.composed.__main__ import RESAMPLED, backbone_of
from lab.composed.windows import TASKS, WORLDS, Pool, Window, windows
from lab.metrics import agreement
from lab.paper.document import commit
from lab.paper.draw import HELD_OUT, MANY, TARGET
from lab.results import keep
from lab.sized import SIZES, SizedPool
from lab.speed.machine import machine

Share = float | Literal["auto"]
REPREFILL = "re-prefill"
"""The arm that all others are held against."""


@dataclass(frozen=True)
class Row:
    """A window under one arm: sums over its multi-hop questions, and what ran of its chunks' tokens."""

    task: str
    arm: str
    kl: float
    blind: float
    agree: float
    right: float
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

    with mock.patch.object(Completion, "complete", wrong):
        yield


@contextmanager
def no_rotation() -> Iterator[None]:
    """Completes phased channels as they stand, no token turned to position 0."""
    with mock.patch.object(TurnTables, "_turn", lambda self, x, *_, **__: x):
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


class Before:
    """A window before its task: its chunks stand exact, or in "new company" are stored, each by itself.

    It is saved, and every arm takes it up over a store of its own: none finds what another made.
    """

    def __init__(self, backbone: HfEngine, stage: Pool, window: Window, folder: Path) -> None:
        self._backbone, self._stage, self._folder = backbone, stage, folder
        self._task, self._order, self._old = window.task, _order(window), (*window.old, TARGET)
        store, policy = ChunkStore.open(folder / "store"), policy_of(0.25, 1.0)
        together = KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)
        if window.task != "new company":
            for chunk in stage.chunks(self._old):
                together.append(chunk)
        else:
            for chunk in stage.chunks(self._order):
                alone = KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)
                alone.append(chunk, archive="now")
                alone.flush()
        together.save(folder / "window")
        together.flush()
        store.close()

    def served(self, policy: ReusePolicy) -> tuple[KameraWindow, Any]:
        """The window after its task under a policy, and the reports of what it took."""
        sampling._own.clear()  # designs that another arm chose by another kernel
        sampling._canonical.clear()
        copied = shutil.copytree(self._folder / "store", Path(tempfile.mkdtemp(dir=self._folder)) / "store")
        kept = KameraWindow.load(self._folder / "window", self._backbone, ChunkStore.open(copied))
        kept._terms = replace(kept._terms, asked=policy, served=policy)
        if self._task == "new company":
            return kept, [kept.append(chunk) for chunk in self._stage.chunks(self._order)]
        if self._task == "any order":
            return kept, [kept.reorder([self._old.index(frame) for frame in self._order])]
        (gone,) = set(self._old) - set(self._order)
        return kept, [kept.evict(self._old.index(gone))]


def measure(
    backbone: HfEngine, stage: Pool, window: Window, arms: dict[str, tuple[ReusePolicy, str]]
) -> list[Row]:
    """Every arm in one window."""
    trial = stage.trial(window.order, MANY)
    hops = trial.blind.hops > 1
    ids = [i for i, hop in zip(trial.ids, hops, strict=True) if hop]
    reference = trial.reference[torch.from_numpy(hops)]
    answers = trial._answers[torch.from_numpy(hops)]
    blind, asked = float(trial.blind.kl[hops].sum()), len(ids)
    best, tokens = float(trial.reprefill.right[hops].sum()), sum(map(_tokens, stage.chunks(_order(window))))
    rows = [Row(window.task, REPREFILL, 0.0, blind, asked, best, asked, tokens, tokens, 0)]
    with tempfile.TemporaryDirectory() as folder:
        before = Before(backbone, stage, window, Path(folder))
        for name, (policy, sabotage) in arms.items():
            with SABOTAGES[sabotage]() if sabotage else nullcontext():
                kept, reports = before.served(policy)
                logits = torch.stack([kept.next_token_logits(i) for i in ids])
                kept.flush()
            notes = [note for report in reports for note in report.notes]
            rows.append(
                Row(
                    window.task,
                    name,
                    float(kl_items(logits, reference).sum()),
                    blind,
                    float(agreement(logits, reference).sum()),
                    float((logits.argmax(-1) == answers).sum()),
                    asked,
                    sum(report.tokens_recomputed for report in reports),
                    tokens,
                    sum(note.startswith("sample refused") for note in notes),
                )
            )
    return rows


def _order(window: Window) -> tuple[int, ...]:
    return (*window.order, TARGET)


def _tokens(chunk: Chunk) -> int:
    return chunk.num_tokens


def rivals(stage: Pool, window: Window, share: float) -> list[Row]:
    """CacheBlend on survivors and on canonicals, asked as the other arms are."""
    trial, rows = stage.trial(window.order, MANY), []
    hops = trial.blind.hops > 1
    chosen = [i for i, hop in enumerate(hops) if hop]
    reference, scene = trial.reference[torch.from_numpy(hops)], trial.scene
    answers = trial._answers[torch.from_numpy(hops)]
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
        right = float((logits.argmax(-1) == answers).sum())
        arm = f"CacheBlend {share:g} on {name}"
        rows.append(
            Row(window.task, arm, lost, blind, agreed, right, len(chosen), round(ran), sum(lengths), 0)
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
    backbone: HfEngine,
    count: int,
    episodes: int,
    world: str,
    arms: dict[str, tuple[ReusePolicy, str]],
    others: Sequence[float] = (),
    tokens: int = 64,
    tasks: Sequence[str] = TASKS,
) -> Iterator[list[Row]]:
    """Every arm in every window of these episodes, episode by episode."""
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    for index in range(episodes):
        stage = SizedPool(backbone, anchor, HELD_OUT, index, world=world, size=SIZES[tokens])
        rows: list[Row] = []
        for window in (window for window in windows(stage, count) if window.task in tasks):
            rows += measure(backbone, stage, window, arms)
            for share in others:
                rows += rivals(stage, window, share)
        yield rows


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """η, agreement, share and refusals by task and arm."""
    tasks: dict[str, Any] = {}
    for task in dict.fromkeys(row.task for row in rows):
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
                "right": sum(row.right for row in picked) / asked,
                "share": sum(row.ran for row in picked) / sum(row.tokens for row in picked),
                "refused": sum(row.refused for row in picked),
                "least": float((1 - kl / np.maximum(blind, 1e-9)).min()),
            }
    return tasks


def table(report: dict[str, Any]) -> str:
    """Tasks side by side, an arm a line: η, agreement, share of right answers, share of the tokens."""
    lines = []
    for found in report["counts"]:
        n = [next(iter(arms.values()))["n"] for arms in found["tasks"].values()]
        lines += [f"{report['family']}, {report['world']}, K = {found['count']}, n = {n}", ""]
        lines += ["| | " + " | ".join(found["tasks"]) + " |", "|---" * (1 + len(found["tasks"])) + "|"]
        for arm in next(iter(found["tasks"].values())):
            cells = [arms[arm] for arms in found["tasks"].values()]
            shown = [
                f"{c['eta']:.3f}, {c['agreement']:.3f}, {c['right']:.3f}, {c['share']:.2f}" for c in cells
            ]
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
    parser.add_argument("--tokens", type=int, choices=SIZES, default=64, help="of a picture, about")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
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
            backbone = HfEngine(backbone.model.to(getattr(torch, args.dtype)), backbone.processor)
        report = {
            "command": f"python -m lab.sampled --family {family} --count {' '.join(map(str, args.count))} "
            f"--episodes {args.episodes} --world {args.world} --shares {' '.join(map(str, args.shares))} "
            f"--max-error {args.max_error:g} --dtype {args.dtype}"
            + ("" if args.tokens == 64 else f" --tokens {args.tokens}")
            + (
                ""
                if args.tasks == [*TASKS]
                else f" --tasks {' '.join(f'{chr(34)}{t}{chr(34)}' for t in args.tasks)}"
            )
            + (f" --rivals {' '.join(map(str, args.rivals))}" if args.rivals else "")
            + (" --sound" if args.sound else ""),
            "commit": commit(),
            "machine": machine(),
            "family": Path(family).name,
            "world": args.world if args.tokens == 64 else "legends",
            "tokens": args.tokens,
            "counts": [],
        }
        varied = [
            str(x) for x in (args.world, args.dtype, args.tokens) if x not in ("override", "float32", 64)
        ]
        name = f"{'-'.join([Path(family).name, *varied])}.json"
        for count in args.count:
            rows: list[Row] = []
            report["counts"].append({"count": count})
            asked = (args.world, arms, args.rivals, args.tokens, args.tasks)
            for index, found in enumerate(run(backbone, count, args.episodes, *asked)):
                rows += found
                report["counts"][-1] |= {"episodes": index + 1, "tasks": summary(rows)}
                if args.output is not None:  # a run that is ended early leaves what it found
                    keep(report, args.output / name)
        print(table(report), flush=True)


def _share(text: str) -> Share:
    return "auto" if text == "auto" else float(text)


if __name__ == "__main__":
    main()
