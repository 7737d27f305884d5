"""Table 6, the envelope: how far the antecedents of a patch may drift (paper, appendix D)."""

from __future__ import annotations

from lab.paper.draw import MAIN, MANY, NEW, PICTURES, RANK, Stage
from lab.paper.tally import Tally
from lab.repairs import NearPatch

NAME = "envelope"
SUPERSET = "envelope, distractors"
DRIFTS: dict[str, tuple[int, ...]] = {
    "reorder": (2, 1, 0),
    "duplicate one": (0, 1, 1),
    "replace one": (0, NEW[1], 2),
    "replace all": NEW,
}
"""What stood before the items frame when the patch was formed; `MAIN` stands there now."""


def measure(stage: Stage, tally: Tally) -> None:
    """The patch of drifted antecedents, and the window's own."""
    trial = stage.trial(MAIN)
    for drift, before in DRIFTS.items():
        stale = trial.judge(NearPatch(RANK, stage.chunks(before)))
        tally.add(NAME, "stale", stale, trial.blind, drift=drift)
        tally.add(NAME, "rebuilt", trial.patched(RANK), trial.blind, drift=drift)


def measure_superset(stage: Stage, tally: Tally) -> None:
    """Distractor pictures come in front of two antecedents; the patch is that of the two alone."""
    pair = MAIN[:2]
    for count in range(len(PICTURES) + 1):
        trial = stage.trial((*PICTURES[:count], *pair), MANY)
        arms = {
            "reprefill": trial.reprefill,
            "blind": trial.blind,
            "stale": trial.judge(NearPatch(RANK, stage.chunks(pair))) if count else trial.patched(RANK),
            "rebuilt": trial.patched(RANK),
        }
        for name, judged in arms.items():
            tally.add(SUPERSET, name, judged, trial.blind, distractors=count)
