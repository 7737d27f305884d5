"""Table 3, reorder: one orbit patch against the ordering's own and another's (paper, section 5)."""

from __future__ import annotations

import math

from kamera.ops import Deltas
from lab.paper.draw import MANY, RANK, Stage
from lab.paper.tally import Tally
from lab.repairs import NearPatch, OrbitPatch

NAME = "reorder"
COUNTS = (3, 4, 6)
"""Antecedents. Orbits of 3 and 4 average all other orderings, those of 6 a sample of 24."""

ORDER = "order's share of the deficit"


def measure(stage: Stage, tally: Tally) -> None:
    """For each count a random ordering is served; its own patch is not in the orbit's mean."""
    for count in COUNTS:
        straight = tuple(range(count))
        # permutations in lexicographic order: the first is the straight one
        nth = int(stage.rng(count).integers(1, math.factorial(count)))
        trial = stage.trial(_permutation(straight, nth), MANY)
        blind = trial.blind
        before = stage.chunks(straight)
        arms = {
            "reprefill": trial.reprefill,
            "blind": blind,
            "exact": trial.patched(RANK),
            "orbit": trial.judge(OrbitPatch(RANK)),
            "transfer": trial.judge(NearPatch(RANK, before)),
        }
        for name, judged in arms.items():
            tally.add(NAME, name, judged, blind, K=count)
        tally.note(NAME, ORDER, _difference(stage, trial.scene.delta, straight), K=count)


def _difference(stage: Stage, served: Deltas, straight: tuple[int, ...]) -> float:
    """‖Δπ − Δid‖ / ‖Δid‖ over all layers and channels."""
    apart = whole = 0.0
    for ours, theirs in zip(served, stage.scene(straight).delta, strict=True):
        for name, delta in theirs.items():
            apart += float((ours[name] - delta).double().square().sum())
            whole += float(delta.double().square().sum())
    return math.sqrt(apart / whole) if whole else float("nan")


def _permutation(items: tuple[int, ...], nth: int) -> tuple[int, ...]:
    """The ``nth`` permutation in lexicographic order."""
    left, chosen = list(items), []
    for size in range(len(items), 0, -1):
        at, nth = divmod(nth, math.factorial(size - 1))
        chosen.append(left.pop(at))
    return tuple(chosen)
