"""Table 10, modality scope: pictures, their text twins, both, and clips (paper, C.5)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.paper.draw import COMPANION, MAIN, MANY, RANK, TARGET, Stage
from lab.paper.tally import Tally
from lab.paper.trial import Trial
from lab.scene import Scene

NAME = "modality"
RANKS = (4, RANK)


def measure(stage: Stage, tally: Tally) -> None:
    """The same facts shown and written (if somebody wrote them), and the frames cut in other ways."""
    shown, target = [stage.content(i) for i in MAIN], stage.content(TARGET)
    told, written = [stage.twin(i) for i in MAIN], stage.twin(TARGET)
    windows = {"pictures": (shown, target)}
    words = [text for text in told if text is not None]
    if written is not None and len(words) == len(told):
        windows |= {
            "text": (words, written),
            "text behind pictures": (shown, written),
            "pictures behind text": (words, target),
        }
    windows |= {
        "behind a clip": ([_joined(shown)], target),
        # of one size: some processors take no others together
        "in a clip": (shown, _joined([stage.content(COMPANION), target])),
    }
    for name, (antecedents, served) in windows.items():
        if name == "pictures":
            trial = stage.trial(MAIN, MANY)
        else:
            chunks = [stage.backbone.chunk(content) for content in antecedents]
            scene = Scene(stage.backbone, stage.anchor, chunks, stage.backbone.chunk(served))
            trial = Trial(scene, stage.questions(MAIN, MANY))
        tally.add(NAME, "reprefill", trial.reprefill, trial.blind, window=name)
        tally.add(NAME, "blind", trial.blind, trial.blind, window=name)
        for rank in RANKS:
            tally.add(NAME, "patch", trial.patched(rank), trial.blind, window=name, rank=rank)


def _joined(contents: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One chunk of several pictures."""
    return [part for content in contents for part in content]
