"""Certify a backbone: ask a probe's questions of every kind of reused KV, and of faulty builds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone

from kamera.certify.kv import KVComparison
from kamera.certify.probe import TRIALS, ProbeScene, digest_of
from kamera.certify.sabotage import OF_PHASE
from kamera.certify.scenes import PROBES, scenes_of
from kamera.certify.trials import DIVERGENCE, Trials
from kamera.certify.verdict import QuestionOutcome, judge, overrule, unseen
from kamera.engines.hf import Backbone, prove_moves, prove_patch, prove_relocation
from kamera.trust import Certificate, Finding, Guarantee, ReusePolicy
from kamera.window import grounds_of

ITEMS = 120
"""Questions about each guarantee: enough for a safe verdict when two of them are lost (`verdict.MARGIN`)."""


def certify(
    backbone: Backbone,
    *,
    probe: str = "pages",
    items: int = ITEMS,
    rank: int = ReusePolicy.rank,
    patch_bytes: float | None = ReusePolicy.patch_bytes,
    guarantees: Sequence[Guarantee] = tuple(TRIALS),
    model: str = "",
) -> Certificate:
    """Run a probe completely. Raises the errors of `run_probe`."""
    *_, last = run_probe(
        backbone,
        probe=probe,
        items=items,
        rank=rank,
        patch_bytes=patch_bytes,
        guarantees=guarantees,
        model=model,
    )
    assert isinstance(last, Certificate), "a probe ends with its certificate"
    return last


def run_probe(
    backbone: Backbone,
    *,
    probe: str = "pages",
    items: int = ITEMS,
    rank: int = ReusePolicy.rank,
    patch_bytes: float | None = ReusePolicy.patch_bytes,
    guarantees: Sequence[Guarantee] = tuple(TRIALS),
    model: str = "",
) -> Iterator[tuple[int, int] | Certificate]:
    """Ask ``items`` questions about each guarantee; yields (asked, wanted), and last the certificate.

    Those about patched KV are always asked. The KV of the first scene must also tell each sabotaged build
    from a sound one. A flaw of the operator, or of the KV that windows show,
    ends the probe with the first scene: no answer can make up for it. ``rank`` and ``patch_bytes`` bound the
    patches, and are those of the policies the certificate will serve; ``guarantees`` are those to ask about,
    ``model`` is a name for people (default: the class's). Raises ValueError for an unknown probe or
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
    poll = _Poll(items, tuple(g for g in TRIALS if g == "patched" or g in guarantees))
    poll.flaw = _flaw(backbone)
    for scene in scenes_of(probe):
        poll.shown.append(scene)
        yield from poll.add(Trials(backbone, scene, policy))
        if poll.done:
            break
    grounds = grounds_of(backbone, policy.budget)
    yield Certificate(
        fingerprint=grounds.fingerprint,
        model=model or type(backbone.model).__name__,
        dtype=grounds.dtype,
        vocabulary=grounds.vocabulary,
        position_limit=grounds.position_limit,
        versions=grounds.versions,
        rank=rank,
        patch_bytes=patch_bytes,
        probe=probe,
        probe_digest=digest_of(probe, poll.shown),
        divergence=DIVERGENCE,
        findings=poll.findings_of(),
        sabotages=poll.sabotages,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _flaw(backbone: Backbone) -> str:
    """The operator's own error on this model, in one line; "" if its proofs hold."""
    proofs = {
        "relocation": prove_relocation(backbone),
        "a full-rank patch": prove_patch(backbone),
        "a move in the live cache": prove_moves(backbone),
    }
    for claim, proof in proofs.items():
        if not proof.holds:
            return (
                f"{claim} is off by {proof.error:.1e} at {proof.worst}, over the tolerance of "
                f"{proof.tolerance:.0e}: the operator itself is wrong here"
            )
    return ""


class _Poll:
    """The questions asked so far: at most ``items`` of each guarantee."""

    def __init__(self, items: int, guarantees: Sequence[Guarantee]) -> None:
        self.items = items
        self.flaw = ""
        self.shown: list[ProbeScene] = []
        self.outcomes: dict[Guarantee, list[QuestionOutcome]] = {g: [] for g in guarantees}
        self.chances: dict[Guarantee, list[float]] = {g: [] for g in guarantees}
        self.compared: dict[Guarantee, KVComparison] = {}
        self.sabotages: dict[str, str] = {}

    @property
    def done(self) -> bool:
        """True if all is asked, or if a flaw decides and something was asked about each guarantee."""
        asked = [len(found) for found in self.outcomes.values()]
        return min(asked) == self.items or bool(self.flaw and all(asked))

    def add(self, trials: Trials) -> Iterator[tuple[int, int]]:
        """Compare a scene's KV, and ask its questions, up to the number still wanted."""
        self._compare(trials)
        for guarantee, outcomes in self.outcomes.items():
            wanted = trials.scene.queries[guarantee][: self.items - len(outcomes)]
            if not wanted:
                continue
            outcomes += trials.ask(guarantee, wanted)
            self.chances[guarantee] += [1.0 / len(query.options) for query in wanted]
            yield sum(map(len, self.outcomes.values())), self.items * len(self.outcomes)

    def findings_of(self) -> dict[Guarantee, Finding]:
        """The findings by guarantee."""
        findings, missed = {}, [name for name, flaw in self.sabotages.items() if not flaw]
        for guarantee, outcomes in self.outcomes.items():
            chances = self.chances[guarantee]
            found = judge(outcomes, sum(chances) / len(chances), self.compared.get(guarantee), guarantee)
            bears = [name for name in missed if guarantee != "survivor" or name in OF_PHASE]
            findings[guarantee] = overrule(unseen(found, bears), self.flaw)
        return findings

    def _compare(self, trials: Trials) -> None:
        first = not self.compared
        found: dict[Guarantee, KVComparison] = {"patched": trials.compare()}
        if first:
            found["patched"] &= trials.compare_after_moves()
        if first and not (self.flaw or found["patched"].flaw):
            self.sabotages = {name: kv.flaw for name, kv in trials.compare_sabotages().items()}
        if "survivor" in self.outcomes:
            found["survivor"] = trials.compare_survivors()
        for guarantee, compared in found.items():
            self.compared[guarantee] = compared if first else self.compared[guarantee] & compared
        # every guarantee is served by what serves patched KV
        self.flaw = self.flaw or self.compared["patched"].flaw
