"""What each tier answers when the left context of a moved chunk changes against it.

    python -m lab.reuse.tiers [--windows 8] [--families gqa,…] [--output FILE]

A store holds an items frame behind three frames that decide its meaning. It is then asked for behind
others: the same, a reordered one, one whose first or last frame is another definition, one less, one with a
picture that means nothing, or new ones. Every service gets the same prompts: ``exact``, ``patched`` (the
default), and, as a control, ``unguarded`` (the nearest stored patch, else the canonical). Answers are held
against a re-prefill and against the truth.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.certify.metrics import kl_items
from kamera.content import Chunk
from kamera.engines.hf import HfEngine
from kamera.reuse import admissions_after_run, admissions_of, strict
from kamera.window import Arrange, Slot, next_token_logits_of, terms_in_force
from lab.paper.draw import MAIN, TARGET, Bench, Stage
from lab.results import keep
from lab.speed.machine import commit, machine
from lab.testbed import load

SHIFTS: dict[str, tuple[int, ...]] = {
    "same": MAIN,
    "reordered": (2, 0, 1),
    "first redefined": (6, 1, 2),
    "last redefined": (0, 1, 6),
    "one less": (1, 2),
    "pictures in front": (9, *MAIN),
    "pictures behind": (*MAIN, 9),
    "another": (6, 7, 8),
}
"""The left contexts in which the frame is asked for; indices into an episode's frames (`lab.paper.draw`)."""

PATCHED = ReusePolicy(rank=32, patch_bytes=None, certified=False, forms="always")
UNGUARDED = replace(PATCHED, minimum="blind", on_miss="blind", max_divergence=1.0)


def measure(name: str, windows: int) -> dict[str, Any]:
    """All services on one backbone."""
    backbone = HfEngine(*load(name))
    bench = Bench.prepare(backbone, 0, 1)
    rows: dict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for index in range(windows):
        stage = bench.stage(index)
        for shift, order in SHIFTS.items():
            for service, tier, right, agree, drift in served(backbone, stage, order):
                rows[service, shift, tier].append((right, agree, drift))
    table = []
    for (service, shift, tier), held in rows.items():
        right, agree, drift = (torch.cat([row[i] for row in held]) for i in range(3))
        table.append(
            {
                "service": service,
                "shift": shift,
                "tier": tier,
                "questions": len(agree),
                "wrong": int((1 - agree).sum()),
                "accuracy": float(right.mean()),
                "kl mean": float(drift.mean()),
                "kl max": float(drift.max()),
            }
        )
    return {"family": name, "rows": table}


def tier_of(window: KameraWindow, order: Sequence[Slot | Chunk]) -> str:
    """Bring a window to an order; the tier of its last segment."""
    plan = window.plan(Arrange(order, "repair", archive=False), policy=strict(terms_in_force(window).served))
    admissions = admissions_of(window, plan)
    window.run(plan)
    return admissions_after_run(admissions, plan, window.slots)[-1].tier


def served(
    backbone: HfEngine, stage: Stage, order: Sequence[int]
) -> Iterator[tuple[str, str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per service: the frame's tier; right, agrees with the re-prefill, and drift of every question."""
    questions = stage.questions(order)
    truth = torch.tensor([int(backbone.builder.tokenize(str(q.answer))[0]) for q in questions])
    chunks = [*stage.chunks(order), stage.chunk(TARGET)]

    def window(policy: ReusePolicy, store: ChunkStore) -> KameraWindow:
        return KameraWindow(backbone, store, testbed.SYSTEM, policy=policy)

    fresh = window(ReusePolicy.exact(), ChunkStore.open("memory://"))
    fresh.run(Arrange(chunks))
    reference = next_token_logits_of(fresh, [q.text for q in questions])
    for service, policy in (
        ("exact", ReusePolicy.exact()),
        ("patched", PATCHED),
        ("unguarded", UNGUARDED),
    ):
        store = ChunkStore.open("memory://")
        for chunk in (*stage.chunks(MAIN), stage.chunk(TARGET)):
            if service == "exact":  # an exact policy reuses what stays in its own window
                break
            window(PATCHED, store).run(Arrange([chunk]))  # every canonical
        held = window(PATCHED if service != "exact" else policy, store)
        held.run(Arrange([*stage.chunks(MAIN), stage.chunk(TARGET)]))
        if service == "exact":
            live = held.fork()
            same = 0
            while same < min(len(order), len(MAIN)) and order[same] == MAIN[same]:
                same += 1
            same += tuple(order) == MAIN
            tier = tier_of(live, [*live.slots[:same], *chunks[same:]])
        elif service == "unguarded":
            live = window(policy, store)
            live.run(Arrange(chunks))
            tier = live.slots[-1].guarantee
        else:
            live = window(policy, store)
            tier = tier_of(live, chunks)
        logits = next_token_logits_of(live, [q.text for q in questions])
        best = logits.argmax(-1)
        yield (
            service,
            tier,
            (best == truth).double(),
            (best == reference.argmax(-1)).double(),
            torch.from_numpy(kl_items(logits, reference)),
        )


def main() -> None:
    """Measure, print, and write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m lab.reuse.tiers")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--families", default="gqa-unled,mla,gqa,mha,deepstack")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in asked.families.split(","):
        made = measure(name, asked.windows)
        found.append(made)
        print(name)
        for row in made["rows"]:
            cells = (f"{k} {v:.4f}" if isinstance(v, float) else f"{v}" for k, v in row.items())
            print("  ", "  ".join(cells), flush=True)
        if asked.output is not None:  # after each family, so that a stopped run leaves what it has
            command = f"python -m lab.reuse.tiers --windows {asked.windows}"
            command += f" --families {asked.families}"
            document = {"command": command, "commit": commit(), "machine": machine(), "families": found}
            keep(document, asked.output)


if __name__ == "__main__":
    main()
