"""Table 4, recall: a patch frozen at eviction against a fresh one (paper, section 5, table 1)."""

from __future__ import annotations

from lab.paper.draw import MAIN, NEW, RANK, Stage
from lab.paper.tally import Tally
from lab.repairs import StalePatch

NAME = "recall"


def measure(stage: Stage, tally: Tally) -> None:
    """The items frame comes back behind three antecedents; 0 to 3 of them were others at eviction."""
    trial = stage.trial(MAIN)
    for turned in range(len(MAIN) + 1):
        replaced = stage.chunks(NEW[:turned])
        arms = {
            "reprefill": trial.reprefill,
            "blind": trial.blind,
            "stale": trial.judge(StalePatch(RANK, replaced)) if turned else trial.patched(RANK),
            "fresh": trial.patched(RANK),
        }
        for name, judged in arms.items():
            tally.add(NAME, name, judged, trial.blind, replaced=turned)
