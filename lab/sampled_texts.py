"""Texts of a conversation that are sampled: what half of their tokens lose.

    python -m lab.sampled_texts [--family deepstack gqa] [--episodes 10] [--output FILE]

Behind two legends stands a text that renames glyphs, and behind it the items frame. The second legend leaves:
what the text says of each glyph's colour changes, and with it the items. Pictures run a quarter of their
tokens, the text half, all, or a quarter of its own; η and agreement as in `lab.sampled`, over the questions
that are answered through the text ("three hops") and over all that join frames.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kamera import ChunkStore, KameraWindow, ReusePolicy, testbed
from kamera.certify.metrics import kl_items
from kamera.patches.anchor import prefill_anchor
from kamera.trust import OnLeave
from kamera.window import placer
from kamera.window.requests import Arrange
from lab.composed.__main__ import backbone_of
from lab.metrics import agreement
from lab.paper.document import commit
from lab.paper.draw import HELD_OUT, MANY, TARGET, Stage
from lab.results import keep
from lab.sampled import policy_of
from lab.speed.machine import machine

BEFORE, AFTER = (0, 1, 2, TARGET), (0, 2)
SURVIVORS = ReusePolicy(minimum="blind", on_miss="blind", certified=False, tolerance=None)
ARMS: dict[str, tuple[ReusePolicy, bool, bool]] = {
    "text: half": (policy_of(0.25, 1.0), True, False),
    "text: half, if .07 is open at most": (policy_of("auto", 0.07), True, False),
    "text: all": (policy_of(0.25, 1.0), True, True),
    "text: a quarter": (policy_of(0.25, 1.0), False, False),
    "survivors": (SURVIVORS, True, False),
}
"""The policy, whether texts are those of a conversation, and whether each runs whole."""


@dataclass(eq=False)
class TextStage(Stage):
    """Two legends, a rename in words, and items."""

    @cached_property
    def episode(self) -> testbed.Episode:
        """The frames; pictures fill up to the items frame."""
        return testbed.World(self.seed).episode(self.index, layout=f"LLr{'P' * (TARGET - 3)}I")


def measure(stage: TextStage, told: dict[tuple[str, str], list[tuple[float, float, float, int]]]) -> int:
    """Add every arm of one episode to ``told``, by arm and kind of question; tokens of the text."""
    trial = stage.trial(AFTER, MANY)
    for name, (policy, conversation, whole) in ARMS.items():
        window = KameraWindow(stage.backbone, ChunkStore.open("memory://"), testbed.SYSTEM, policy=policy)
        for chunk in stage.chunks(BEFORE):
            window.append(chunk)
        order = [slot for i, slot in enumerate(window.slots) if i != 1]
        longest = mock.patch.object(placer, "SHORTEST_KEPT", 1 << 20) if whole else nullcontext()
        with longest:
            stays: OnLeave = "keep" if policy is SURVIVORS else "repair"
            window.run(window.plan(Arrange(order, stays, archive=not conversation)))
        logits = torch.stack([window.next_token_logits(i) for i in trial.ids])
        for kind, chosen in (
            ("two and three hops", trial.blind.hops > 1),
            ("three hops", trial.blind.hops > 2),
        ):
            at = torch.from_numpy(chosen)
            if bool(at.any()):
                lost = float(kl_items(logits[at], trial.reference[at]).sum())
                agreed = float(agreement(logits[at], trial.reference[at]).sum())
                told[name, kind].append((lost, float(trial.blind.kl[chosen].sum()), agreed, int(at.sum())))
    return stage.chunk(2).num_tokens


def run(family: str, episodes: int) -> dict[str, Any]:
    """η, agreement and n, by arm and kind of question."""
    backbone = backbone_of(family)
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    told: dict[tuple[str, str], list[tuple[float, float, float, int]]] = defaultdict(list)
    tokens = [measure(TextStage(backbone, anchor, HELD_OUT, index), told) for index in range(episodes)]
    found: dict[str, Any] = {"family": family, "tokens of the text": [min(tokens), max(tokens)]}
    for (name, kind), rows in told.items():
        lost, blind, agreed, n = (sum(column) for column in zip(*rows, strict=True))
        found.setdefault(name, {})[kind] = {"n": n, "eta": 1 - lost / blind, "agreement": agreed / n}
    return found


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="+", default=["deepstack", "gqa"])
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {
        "command": f"python -m lab.sampled_texts --family {' '.join(args.family)} --episodes {args.episodes}",
        "commit": commit(),
        "machine": machine(),
        "families": [run(family, args.episodes) for family in args.family],
    }
    if args.output is not None:
        keep(report, args.output)
    print(json.dumps(report["families"], indent=1))


if __name__ == "__main__":
    main()
