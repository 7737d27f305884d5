"""Table 8, depth: a patch on the deepest layers only, or on one layer (paper, section 4, C.3)."""

from __future__ import annotations

from collections.abc import Sequence

from kamera.ops import KV, Patch
from lab.paper.draw import MAIN, RANK, Stage
from lab.paper.tally import Tally

NAME = "depth"


def measure(stage: Stage, tally: Tally) -> None:
    """The plain patch cut to the deepest 1, 2, … layers, and to each single one."""
    trial = stage.trial(MAIN)
    patch = trial.scene.patch.truncate(RANK)
    layers = len(patch.layers)
    # layer 0 has nothing to patch: all layers but it are all
    for deep in range(1, layers):
        judged = trial.judge_kv(*_only(stage, patch, range(layers - deep, layers)))
        tally.add(NAME, "deepest", judged, trial.blind, layers=deep)
    for layer in range(1, layers):
        tally.add(NAME, "one layer", trial.judge_kv(*_only(stage, patch, [layer])), trial.blind, layer=layer)


def _only(stage: Stage, patch: Patch, kept: Sequence[int]) -> tuple[KV, int]:
    """The window's KV under the ``kept`` layers of a patch, and their bytes."""
    part = Patch.of([f if i in kept else {} for i, f in enumerate(patch.layers)], patch.groups)
    return stage.scene(MAIN).patched(part), part.nbytes
