"""Table 2, the repair frontier: patches against every rival at matched KV bytes (paper, section 6, C.3)."""

from __future__ import annotations

from lab.arms import known_arms, parse_arm
from lab.paper.draw import MAIN, Stage
from lab.paper.tally import Tally
from lab.repairs import SharedBasis

NAME = "frontier"
RANKS = (1, 2, 4, 8, 16, 32)
"""Budgets: the bytes of a plain patch of this rank over all layers and channels."""

HIGHEST = 64
"""The paper's largest rank, of the plain patch only."""

OURS = ("patch", "best", "deep-half", "shared-basis")
RIVALS = ("sink", "first-k", "cacheblend", "vlcache", "deviation-oracle", "query-oracle", "low-rank-k")
ANCHORS = ("stale-rope", "mask")


def measure_patches(stage: Stage, tally: Tally) -> None:
    """The plain patch alone, in every rank."""
    trial = stage.trial(MAIN)
    for rank in (*RANKS, HIGHEST):
        tally.add(NAME, "patch", trial.patched(rank), trial.blind, rank=rank)


def measure(stage: Stage, tally: Tally) -> None:
    """All arms on one window."""
    trial = stage.trial(MAIN)
    blind = trial.blind
    tally.add(NAME, "reprefill", trial.reprefill, blind)
    tally.add(NAME, "blind", blind, blind)
    for name in ANCHORS:
        tally.add(NAME, name, trial.judge(parse_arm(name)), blind)
    measure_patches(stage, tally)
    known = {name.removesuffix("@m") for name in known_arms()}
    for rank in RANKS:
        assert stage.basis is not None, "a bench fits the basis before it asks"
        tally.add(NAME, "shared-basis", trial.judge(SharedBasis(rank, stage.basis)), blind, rank=rank)
        for name in ("best", "deep-half", *RIVALS):
            if name in known:
                tally.add(NAME, name, trial.judge(parse_arm(f"{name}@{rank}")), blind, rank=rank)
    layers = len(trial.scene.layout)
    for deep in range(1, layers):
        percent = 100 * deep // layers
        tally.add(NAME, "layers", trial.judge(parse_arm(f"layers@{percent}")), blind, percent=percent)
