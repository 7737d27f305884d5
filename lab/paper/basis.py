"""Table 9, the shared basis: directions of other items against the item's own (paper, section 4, C.2)."""

from __future__ import annotations

from kamera.ops import LowRank, Patch, floats, kept_energy
from lab.paper.draw import MAIN, Stage
from lab.paper.tally import Tally

NAME = "basis"
RANKS = (4, 8, 16, 32)


def measure(stage: Stage, tally: Tally) -> None:
    """As many directions from the pooled basis of held-out items as from the item's own SVD."""
    trial = stage.trial(MAIN)
    scene = trial.scene
    assert stage.basis is not None, "a bench fits the basis before it asks"
    for rank in RANKS:
        layers: list[dict[str, LowRank]] = []
        for deltas, basis in zip(scene.delta, stage.basis.layers, strict=True):
            rights = {name: basis[name][:, :rank].to(delta) for name, delta in deltas.items()}
            layers.append({n: LowRank(deltas[n] @ right, right) for n, right in rights.items()})
        pooled = Patch.of(layers, scene.delta.groups)
        # per chunk only the coefficients are stored
        lefts = [floats(f.left) for layer in layers for f in layer.values()]
        tally.add(NAME, "own", trial.patched(rank), trial.blind, rank=rank)
        tally.add(
            NAME,
            "pooled",
            trial.judge_kv(scene.patched(pooled), sum(t.nbytes for t in lefts)),
            trial.blind,
            rank=rank,
        )
        own = scene.patch.truncate(rank)
        tally.note(NAME, "energy, own", kept_energy(scene.delta, own), rank=rank)
        tally.note(NAME, "energy, pooled", kept_energy(scene.delta, pooled), rank=rank)
