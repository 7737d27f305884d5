"""Table 7, the refresh: a small update of an old patch against a full rebuild (paper, appendix D)."""

from __future__ import annotations

from dataclasses import replace

from lab.paper.draw import MAIN, NEW, RANK, Stage
from lab.paper.tally import Tally
from lab.paper.trial import Judged
from lab.repairs import StalePatch, UpdatedPatch

NAME = "refresh"
UPDATES = (4, 16)
"""Ranks of the update on top of an old patch of rank `RANK`."""


def measure(stage: Stage, tally: Tally) -> None:
    """Up to three of three antecedents were swapped since the old patch was formed.

    Bytes of an update are those sent: the update alone.
    """
    trial = stage.trial(MAIN)
    rebuilt = trial.patched(RANK)
    for swapped in range(len(MAIN) + 1):
        gone = stage.chunks(NEW[:swapped])
        before = [*gone, *stage.chunks(MAIN[swapped:])]
        stale = trial.judge(StalePatch(RANK, gone)) if swapped else rebuilt
        tally.add(NAME, "stale", _sent(stale, 0.0), trial.blind, swapped=swapped)
        for rank in UPDATES:
            update = trial.judge(UpdatedPatch(rank, before, old_rank=RANK))
            update = _sent(update, 1 - rebuilt.nbytes / update.nbytes)
            tally.add(NAME, "update", update, trial.blind, swapped=swapped, rank=rank)
        tally.add(NAME, "rebuilt", rebuilt, trial.blind, swapped=swapped)


def _sent(judged: Judged, part: float) -> Judged:
    """Priced at a part of its bytes: what is sent on top of the old patch."""
    return replace(
        judged,
        nbytes=part * judged.nbytes,
        share=part * judged.share,
        share_bf16=part * judged.share_bf16,
    )
