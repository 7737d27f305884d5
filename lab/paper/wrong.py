"""The tables that serve patches, measured again with an operator that is wrong (`lab.sabotage.arms`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kamera.ops import KV, Layout, Patch
from lab.paper import envelope, frontier, recall, reorder, survivors
from lab.paper.draw import FITTED, MAIN, NEW, RANK, Stage
from lab.paper.tally import Tally
from lab.sabotage.arms import SOUND, Arm, Material, sabotage, sound
from lab.scene import Operator

TABLES: dict[str, Callable[[Stage, Tally], None]] = {
    frontier.NAME: frontier.measure_patches,
    reorder.NAME: reorder.measure,
    recall.NAME: recall.measure,
    survivors.NAME: survivors.measure,
    survivors.BOUND: survivors.measure_bound,
    envelope.NAME: envelope.measure,
    envelope.SUPERSET: envelope.measure_superset,
}
"""Sections in which something is served through the operator, and what measures that alone."""


class Wrong:
    """Asks every stage it is given again under the sound operator and each wrong one, up to ``items`` each.

    The stage's own measurements come first: what is true there is not computed again. ``tables`` are names
    in `TABLES`.
    """

    def __init__(self, axes: int, items: int, tables: Iterable[str]) -> None:
        self.arms: dict[str, Arm] = {SOUND: sound, **sabotage(axes)}
        self.tallies = {name: Tally() for name in self.arms}
        self.items, self.tables = items, [name for name in tables if name in TABLES]
        self._another: Patch | None = None

    def measure(self, stage: Stage) -> None:
        """One episode."""
        for name, arm in self.arms.items():
            tally = self.tallies[name]
            wanted = [table for table in self.tables if tally.questions(table) < self.items]
            if wanted:
                under = stage.under(self._operator(arm, stage))
                for table in wanted:
                    TABLES[table](under, tally)

    def _operator(self, arm: Arm, stage: Stage) -> Operator:
        if self._another is None:
            elsewhere = Stage(stage.backbone, stage.anchor, FITTED + 1, 0, regime=stage.regime)
            self._another = elsewhere.scene(MAIN).patch.truncate(RANK)
        return operator(arm, self._another, stage.scene(NEW).patch.truncate(RANK), stage.index)


def operator(arm: Arm, another: Patch, stale: Patch, seed: int) -> Operator:
    """An arm of the sabotage as the operator of a scene.

    KV that is served without a patch gets no wrong one either: only its rotation is at stake.
    """

    def serve(kv: KV, patch: Patch | None, layout: Layout, offset: Sequence[int]) -> KV:
        if patch is None:
            patch = wrong = old = Patch.of([{} for _ in layout], kv.groups)
        else:
            wrong, old = another, stale
        return arm(Material(kv, patch, layout, offset, wrong, old, seed))

    return serve
