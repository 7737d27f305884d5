"""Certify a backbone: ask a probe's questions of every kind of reused KV, and of faulty builds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone

from kamera.certify.probe import PROBES, TRIALS, ProbeScene, digest_of
from kamera.certify.sabotage import OF_PATCHES, SABOTAGES, SHOWN_BY_KV
from kamera.certify.trials import DIVERGENCE, Trials
from kamera.certify.verdict import Outcome, judge, unseen
from kamera.engines.hf import Backbone, prove_patch, prove_relocation
from kamera.window import Certificate, Finding, Guarantee, ReusePolicy, grounds_of, library_versions

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
    for step in run_probe(
        backbone,
        probe=probe,
        items=items,
        rank=rank,
        patch_bytes=patch_bytes,
        guarantees=guarantees,
        model=model,
    ):
        if isinstance(step, Certificate):
            return step
    raise AssertionError("a probe ends with its certificate")


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

    Those about patched KV are always asked, and of each sabotaged build too. ``rank`` and ``patch_bytes``
    bound the patches, and are those of the policies the certificate will serve; ``guarantees`` are those to
    ask about, ``model`` is a name for people (default: the class's). Raises ValueError for an unknown probe
    or guarantee, ModalityNotSupported or ProcessorRequired for a backbone that cannot be shown a picture.
    """
    if unknown := [g for g in guarantees if g not in TRIALS]:
        raise ValueError(f"guarantee {unknown[0]!r} is none of {', '.join(TRIALS)}")
    if probe not in PROBES:
        raise ValueError(f"probe {probe!r} is none of {', '.join(PROBES)}")
    if items < 1:
        raise ValueError(f"items {items} must be at least 1")
    # uncertified: the probe has to serve it before a certificate exists
    policy = ReusePolicy(rank=rank, patch_bytes=patch_bytes, certified=False, forms="always")
    tally = _Tally(items, tuple(g for g in TRIALS if g == "patched" or g in guarantees))
    for scene in PROBES[probe]():
        tally.shown.append(scene)
        yield from tally.add(Trials(backbone, scene, policy))
        if tally.done:
            break
    grounds = grounds_of(backbone, policy.budget)
    findings, sabotages = tally.judged()
    yield Certificate(
        fingerprint=grounds.fingerprint,
        model=model or type(backbone.model).__name__,
        dtype=grounds.dtype,
        vocabulary=grounds.vocabulary,
        position_limit=grounds.position_limit,
        versions=library_versions(),
        rank=rank,
        patch_bytes=patch_bytes,
        probe=probe,
        probe_digest=digest_of(probe, tally.shown),
        divergence=DIVERGENCE,
        antecedents=len(TRIALS["composed"][1]) - 1,
        findings=_overruled(findings, _flaw(backbone)),
        sabotages=sabotages,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )


def _flaw(backbone: Backbone) -> str | None:
    """The operator's own error on this model, in one line; None if its proofs hold."""
    proofs = {"relocation": prove_relocation(backbone), "a full-rank patch": prove_patch(backbone)}
    for claim, proof in proofs.items():
        if not proof.holds:
            return (
                f"{claim} is off by {proof.error:.1e} at {proof.worst}, over the tolerance of "
                f"{proof.tolerance:.0e}: the operator itself is wrong here"
            )
    return None


def _overruled(findings: dict[Guarantee, Finding], flaw: str | None) -> dict[Guarantee, Finding]:
    """The findings under a flaw of the operator: every verdict is "unsafe" then, for any answers."""
    if flaw is None:
        return findings
    return {g: replace(finding, verdict="unsafe", reason=flaw) for g, finding in findings.items()}


class _Tally:
    """The questions asked so far: at most ``items`` of each guarantee."""

    def __init__(self, items: int, guarantees: Sequence[Guarantee]) -> None:
        self.items = items
        self.shown: list[ProbeScene] = []
        self.outcomes: dict[Guarantee, list[Outcome]] = {g: [] for g in guarantees}
        self.chances: dict[Guarantee, list[float]] = {g: [] for g in guarantees}
        self.sabotaged: dict[str, list[Outcome]] = {name: [] for name in SABOTAGES}
        self.closed: dict[str, dict[str, float]] = {}

    @property
    def done(self) -> bool:
        return all(len(outcomes) == self.items for outcomes in self.outcomes.values())

    def add(self, trials: Trials) -> Iterator[tuple[int, int]]:
        """Ask a scene's questions, up to the number still wanted."""
        for guarantee, outcomes in self.outcomes.items():
            wanted = trials.scene.asked[guarantee][: self.items - len(outcomes)]
            if not wanted:
                continue
            outcomes += trials.ask(guarantee, wanted)
            self.chances[guarantee] += [1.0 / len(query.options) for query in wanted]
            if guarantee == "patched":
                for name, answered in trials.ask_sabotaged(wanted):
                    self.sabotaged[name] += answered
                self.closed = self.closed or trials.closed()
            yield sum(map(len, self.outcomes.values())), self.items * len(self.outcomes)

    def judged(self) -> tuple[dict[Guarantee, Finding], dict[str, Finding]]:
        """The findings by guarantee, and by sabotage."""
        chance = {guarantee: sum(found) / len(found) for guarantee, found in self.chances.items()}
        sabotages = {
            name: judge(
                outcomes, chance["patched"], self.closed[name] if name in SHOWN_BY_KV else None, f"({name})"
            )
            for name, outcomes in self.sabotaged.items()
        }
        passed = [name for name, finding in sabotages.items() if finding.verdict == "safe"]
        findings = {}
        for guarantee, outcomes in self.outcomes.items():
            closed = self.closed[""] if guarantee == "patched" else None
            bears = [name for name in passed if guarantee != "survivor" or name not in OF_PATCHES]
            findings[guarantee] = unseen(judge(outcomes, chance[guarantee], closed, guarantee), bears)
        return findings, sabotages
