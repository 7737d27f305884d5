"""Proofs of sound and of deliberately wrong patches, beside the questions they stand in for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kamera import ReusePolicy, testbed
from kamera.engines import Span
from kamera.engines.hf import HfEngine
from kamera.ops import KV, Patch, patch_of
from kamera.patches import Before, Facts, Prover, prefill_anchor
from kamera.trust import Proof
from lab.paper.draw import COMPANION, HELD_OUT, MAIN, MANY, NEW, Stage
from lab.sabotage.arms import Material, sabotage
from lab.scene import Scene

RANKS = (1, 2, 4, 8, 16, 24, 32)


@dataclass(frozen=True)
class Row:
    """One KV in one window: what its proof says, and what multi-hop questions say of it.

    ``kl``, ``flips``, ``kv`` and ``proved`` are the proof's; ``answered`` is whether its answers alone would
    have proved it. ``narrow`` and ``narrow_answered`` are the same of a model without a tokenizer, asked four
    one-hop questions of one kind. ``lost`` is the mean KL of the real questions to the re-prefill (nats),
    ``right`` the number of them answered rightly, of ``n``. ``bytes`` of the patch.
    """

    arm: str
    episode: int
    kl: float
    flips: int
    kv: float
    proved: bool
    answered: bool
    narrow: bool
    narrow_answered: bool
    lost: float
    worst: float
    right: float
    n: int
    bytes: int


def rows(backbone: HfEngine, episodes: int, tolerance: float) -> Iterator[Row]:
    """Every arm in one window of each episode."""
    anchor = prefill_anchor(backbone, testbed.SYSTEM)
    bare = HfEngine(backbone.model)
    for index in range(episodes):
        stage = Stage(backbone, anchor, HELD_OUT, index)
        provers = Prover(backbone, anchor, tolerance), Prover(bare, anchor, tolerance)
        yield from _window(stage, *provers, tolerance)


def _window(stage: Stage, prover: Prover, narrow: Prover, tolerance: float) -> Iterator[Row]:
    trial = stage.trial(MAIN, MANY)
    scene = trial.scene
    for question, ids in zip(trial.questions, trial.ids, strict=True):
        if question.hops == 1:
            narrow.remember(ids)
    facts, before = facts_of(scene), before_of(scene)
    sized, proof = prover.form(
        ReusePolicy().budget,
        scene.delta,
        Span(scene.canonical, None, scene.offset),
        scene.conditioned,
        facts,
        before,
    )
    patch = sized.formed.patch
    layout = scene.layout
    other = stage.scene((*NEW[:2], MAIN[0]))
    another = Scene(stage.backbone, stage.anchor, stage.chunks(MAIN[:2]), stage.chunk(COMPANION))
    dtype = scene.dtype
    of = Material(
        canonical=scene.canonical,
        patch=patch,
        layout=layout,
        offset=scene.offset,
        another=patch_of(another.delta, 64, dtype).patch,
        stale=patch_of(other.delta, 64, dtype).patch,
        seed=stage.index,
    )
    arms: dict[str, tuple[KV, int]] = {"formed": (scene.patched(patch), patch.nbytes)}
    arms |= {f"rank {r}": (scene.patched(p), p.nbytes) for r in RANKS for p in [_cut(scene, r)]}
    arms["blind"] = (scene.blind, 0)
    wrong = sabotage(stage.backbone.axes)
    arms |= {f"SABOTAGE {name}": (serve(of), patch.nbytes) for name, serve in wrong.items()}
    for name, (kv, nbytes) in arms.items():
        still = (0,) * stage.backbone.axes
        shown, few = (
            p.proof(scene.delta, scene.conditioned, Span(kv, None, still), facts, before)
            for p in (prover, narrow)
        )
        assert name != "formed" or abs(shown.kl - proof.kl) <= max(5e-3, proof.kl), (shown, proof)
        judged = trial.judge_kv(kv)
        asked = judged.hops > 1
        yield Row(
            name,
            stage.index,
            shown.kl,
            shown.flips,
            shown.kv,
            shown.holds_at(tolerance),
            _answered(shown, tolerance),
            few.holds_at(tolerance),
            _answered(few, tolerance),
            float(judged.kl[asked].mean()),
            float(judged.kl[asked].max()),
            float(judged.right[asked].sum()),
            int(asked.sum()),
            nbytes,
        )


def _answered(proof: Proof, tolerance: float) -> bool:
    """True if the answers alone are those behind the true KV."""
    return proof.flips == 0 and proof.kl <= tolerance


def _cut(scene: Scene, rank: int) -> Patch:
    return patch_of(scene.delta, rank, scene.dtype).patch


def facts_of(scene: Scene) -> Facts:
    """The target."""
    return Facts(scene.target.id, scene.encoded, scene.target.label)


def before_of(scene: Scene) -> Before:
    """What stands before the target."""
    still = (0,) * scene.backbone.axes
    chunks = tuple(Facts(c.id, scene.backbone.encode(c), c.label) for c in scene.antecedents)
    names, spans = tuple(c.id for c in scene.antecedents), (Span(scene.context, None, still),)
    return Before(names, "exact", spans, chunks, still, still)
