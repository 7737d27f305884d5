"""Certify a backbone: ask a probe's questions of every kind of reused KV, and of faulty builds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from tqdm import tqdm

from kamera.certify import pages, world
from kamera.certify.kv import KVComparison
from kamera.certify.probe import PROBE_SEED, TRIALS, ProbeScene, digest_of
from kamera.certify.sabotage import SABOTAGES, sabotages
from kamera.certify.trials import DIVERGENCE, Trials
from kamera.certify.verdict import QuestionOutcome, doubt, judge, overrule
from kamera.engines.hf import (
    Backbone,
    HfEngine,
    OperatorProof,
    prove_moves,
    prove_patch,
    prove_relocation,
)
from kamera.trust import Certificate, Finding, Guarantee, ReusePolicy
from kamera.window import grounds_of

ITEMS = 120
"""Questions about each guarantee: enough for a safe verdict when two of them are lost (`verdict.MARGIN`)."""

PROBES = {"pages": pages.draw_scene, "world": world.draw_scene}
"""Pages of English text and captioned shapes, for backbones that read; frames of the synthetic world, for the
shipped ones, which read none."""


def certify(
    backbone: Backbone | HfEngine,
    *,
    probe: str = "pages",
    items: int = ITEMS,
    rank: int = ReusePolicy.rank,
    patch_bytes: float | None = ReusePolicy.patch_bytes,
    guarantees: Sequence[Guarantee] = tuple(TRIALS),
    model: str = "",
    bar: tqdm[Any] | None = None,
) -> Certificate:
    """Ask ``items`` questions about each guarantee; ``bar`` counts them.

    Questions about patched KV are always asked, and each sabotaged build gets them too: in the first scene,
    and in further ones if the KV alone does not show its fault. An error of the operator, or of the KV that
    windows show, ends the probe with the first scene, whatever the answers are. ``rank`` and ``patch_bytes``
    bound the patches, and are those of the policies that may use the certificate. ``guarantees`` are those to
    test, ``model`` is a name for people (default: the class's). Raises ValueError for an unknown probe or
    guarantee, ModalityNotSupported or ProcessorRequired for a backbone that cannot be shown a picture.
    """
    if unknown := [g for g in guarantees if g not in TRIALS]:
        raise ValueError(f"guarantee {unknown[0]!r} is none of {', '.join(TRIALS)}")
    if probe not in PROBES:
        raise ValueError(f"probe {probe!r} is none of {', '.join(PROBES)}")
    if items < 1:
        raise ValueError(f"items {items} must be at least 1")
    # uncertified: the probe has to serve it before a certificate exists
    policy = ReusePolicy(rank=rank, patch_bytes=patch_bytes, certified=False, forms="always", audit=0.0)
    engine = backbone.engine
    faults = tuple(sabotages(engine.axes))
    poll = _Poll(items, tuple(g for g in TRIALS if g == "patched" or g in guarantees), faults)
    poll.flaw = _flaw(engine)
    for scene in scenes_of(probe):
        poll.shown.append(scene)
        for count in poll.ask(Trials(engine, scene, policy)):
            if bar is not None:
                bar.update(count)
        if poll.done:
            break
    findings, wrong = poll.judge_all()
    return Certificate(
        model=model or type(engine.model).__name__,
        grounds=grounds_of(engine, policy.budget),
        probe=probe,
        probe_digest=digest_of(probe, poll.shown),
        divergence=DIVERGENCE,
        findings=findings,
        sabotages=wrong,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def scenes_of(probe: str) -> Iterator[ProbeScene]:
    """All scenes of a probe, the same ones every time."""
    return (PROBES[probe](PROBE_SEED, index) for index in itertools.count())


def _flaw(engine: HfEngine) -> str:
    """The operator's own error on this model, in one line; "" if its proofs hold."""
    for claim, proof in _proofs(engine):
        if not proof.holds:
            return (
                f"{claim} is off by {proof.error:.1e} at {proof.worst}, over the tolerance of "
                f"{proof.tolerance:.0e}: the operator itself is wrong here"
            )
    return ""


def _proofs(engine: HfEngine) -> Iterator[tuple[str, OperatorProof]]:
    yield "relocation", prove_relocation(engine)
    yield "a full-rank patch", prove_patch(engine)
    yield "a move in the live cache", prove_moves(engine)


class _Poll:
    """The questions asked so far: at most ``items`` of each guarantee, and of each of ``faults``."""

    def __init__(self, items: int, guarantees: Sequence[Guarantee], faults: Sequence[str]) -> None:
        self.items = items
        self.flaw = ""
        self.shown: list[ProbeScene] = []
        self.outcomes: dict[Guarantee, list[QuestionOutcome]] = {g: [] for g in guarantees}
        self.chances: dict[Guarantee, list[float]] = {g: [] for g in guarantees}
        self.compared = dict.fromkeys(guarantees, KVComparison())
        self.sabotaged: dict[str, list[QuestionOutcome]] = {name: [] for name in faults}
        self.sabotaged_kv: dict[str, KVComparison] = {}

    @property
    def done(self) -> bool:
        """True if all is asked, or if a flaw decides and something was asked about each guarantee."""
        asked = [len(found) for found in self.outcomes.values()]
        return min(asked) == self.items or bool(self.flaw and all(asked))

    def ask(self, trials: Trials) -> Iterator[int]:
        """Compare a scene's KV, and ask its questions, as many as are still wanted; yields how many."""
        self._compare(trials)
        for guarantee, outcomes in self.outcomes.items():
            wanted = trials.scene.queries[guarantee][: self.items - len(outcomes)]
            if not wanted:
                continue
            faults = self._open_faults() if guarantee == "patched" and not self.flaw else []
            for name, answered in trials.ask(guarantee, wanted, faults).items():
                (outcomes if name == guarantee else self.sabotaged[name]).extend(answered)
            self.chances[guarantee] += [1.0 / len(query.options) for query in wanted]
            yield len(wanted)

    def judge_all(self) -> tuple[dict[Guarantee, Finding], dict[str, Finding]]:
        """The findings by guarantee, and by sabotage."""
        chance = {guarantee: sum(found) / len(found) for guarantee, found in self.chances.items()}
        wrong = {
            name: judge(outcomes, chance["patched"], self.sabotaged_kv[name], f"({name})")
            for name, outcomes in self.sabotaged.items()
            if outcomes
        }
        findings = {}
        for guarantee, outcomes in self.outcomes.items():
            found = judge(outcomes, chance[guarantee], self.compared[guarantee], guarantee)
            bears = {n: f for n, f in wrong.items() if guarantee != "survivor" or not SABOTAGES[n].patch}
            findings[guarantee] = overrule(doubt(found, bears), self.flaw)
        return findings, wrong

    def _open_faults(self) -> list[str]:
        """The faults to ask about: each in the first scene, then those alone that the KV does not show."""
        return [name for name, kv in self.sabotaged_kv.items() if not (kv.flaw and self.sabotaged[name])]

    def _compare(self, trials: Trials) -> None:
        first = len(self.shown) == 1
        self.compared["patched"] &= trials.compare()
        if first:
            self.compared["patched"] &= trials.compare_after_moves()
        # every guarantee is served by what serves patched KV
        self.flaw = self.flaw or self.compared["patched"].flaw
        if first and not self.flaw:
            self.sabotaged_kv = {name: trials.compare_sabotage(name) for name in self.sabotaged}
        if "survivor" in self.outcomes:
            self.compared["survivor"] &= trials.compare_survivors()
