"""The rules from a probe's answers to a finding, each with its constant and the reason for that.

* The KV itself comes first (`kamera.certify.kv`): where it is not what it should be, in any layer and
  channel, it is "unsafe" however it answers, for a model may answer right without it.
* Too few questions to know are said to be: "cannot tell", with the number asked (`FEWEST`).
* Re-prefill must answer well (`SKILL`), or no loss against it can be seen: "cannot tell".
* Served KV must not answer worse than re-prefill by more than `MARGIN`: "unsafe" when it does, and
  "cannot tell" while there are too few questions to know.
* If blind reuse changes answers, served KV must restore them (`FLIPS`).
* If blind reuse changes none (a model that reads both chunks while it answers), answers cannot show that
  a patch does anything: one of zeros would pass. Then it must close the gap in the distribution of the next
  token (`ETA`). If even that is not seen the probe does not reach the model's binding: "cannot tell". It
  is not called safe, as other questions may bind where these did not.
* Patched KV must restore most of the deficit in every channel (`kv.HALF`).
* Every faulty build must come out unsafe by these rules, or the probe is blind to its fault and cannot tell
  (`doubt`).

Each rule errs on the side of not serving: the whole interval must be on the right side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kamera.certify.kv import KVComparison
from kamera.certify.metrics import eta_interval
from kamera.trust import Estimate, Finding, Verdict

SKILL = 0.5
"""Smallest share of the range from chance to perfect that re-prefill must reach. `MARGIN` is then at most a
tenth of the possible loss."""

MARGIN = 0.05
"""Largest accepted loss of accuracy. About 40 questions resolve it if none is lost, 120 if two are; the
failure it guards against halves accuracy (paper, section 1)."""

FLIPS = 0.8
"""Smallest share of the answers changed by blind reuse that the patch must restore. The paper's patch
restores 0.96, repairs by recomputed tokens 0.21 to 0.44 (section 6)."""

ETA = 0.5
"""Smallest η if no answer changes: more than half of the gap closed. The paper's rank-32 patch closes about
0.8 to 0.9 (section 3); a broken one is near 0 or below."""

_Z = 1.959964  # two-sided 95 %

_AS_IT_SHOULD_BE = KVComparison()

FEWEST = math.ceil(_Z / MARGIN) - 2
"""Questions that can show a loss to be below `MARGIN`: as many, and none of them lost."""


@dataclass(frozen=True)
class QuestionOutcome:
    """One question: the answer of each arm ("" for none of the options), and its divergence.

    The divergences are KL to the re-prefill's next-token distribution, in nats.
    """

    truth: str
    reprefill: str
    blind: str
    served: str
    blind_kl: float
    served_kl: float


def judge(
    outcomes: Sequence[QuestionOutcome],
    chance: float,
    compared: KVComparison = _AS_IT_SHOULD_BE,
    name: str = "patched",
) -> Finding:
    """Judge served KV by its answers to questions; a guess is right with probability ``chance``.

    ``compared`` is what the KV itself was found to be; ``name`` is that of the judged KV.
    """
    if not outcomes:
        raise ValueError("no question was asked: there is nothing to judge")
    prefilled, blind, served = (
        wilson([getattr(o, arm) == o.truth for o in outcomes]) for arm in ("reprefill", "blind", "served")
    )
    flipped = [o for o in outcomes if o.blind != o.reprefill]
    recovered = wilson([o.served == o.reprefill for o in flipped]) if flipped else None
    share = eta_interval([o.served_kl for o in outcomes], [o.blind_kl for o in outcomes])
    eta = None if math.isnan(share.mean) else share
    finding = Finding(
        "cannot tell", "", len(outcomes), chance, prefilled, blind, served, eta, flip_recover=recovered
    )
    verdict, reason = _verdict(finding, loss(outcomes, "served"), loss(outcomes, "blind"), name)
    if compared.lack and verdict == "safe":
        verdict, reason = "cannot tell", f"these answers do not show it, but the KV does: {compared.lack}"
    return overrule(replace(finding, verdict=verdict, reason=reason), compared.flaw)


def overrule(finding: Finding, flaw: str) -> Finding:
    """The finding under a flaw of the operator or of the KV: "unsafe", for any answers; "" is none."""
    return replace(finding, verdict="unsafe", reason=flaw) if flaw else finding


def doubt(finding: Finding, sabotages: Mapping[str, Finding]) -> Finding:
    """The finding, "cannot tell" instead of "safe" if the probe does not tell faulty builds from it.

    ``sabotages`` are the findings about those that apply to it: each must be unsafe. A finding that is not
    safe stays as it is.
    """
    if finding.verdict != "safe":
        return finding
    blind = ", ".join(name for name, found in sabotages.items() if found.verdict == "safe")
    if blind:
        return replace(finding, verdict="cannot tell", reason=f"the probe does not see: {blind}")
    few = ", ".join(name for name, found in sabotages.items() if found.verdict != "unsafe")
    if few:
        reason = f"{_few(finding.n)} to tell a sound build from: {few}"
        return replace(finding, verdict="cannot tell", reason=reason)
    return finding


def _verdict(found: Finding, served: Estimate, blind: Estimate, name: str) -> tuple[Verdict, str]:
    """From what was measured, and the changes of accuracy by served and by blind KV."""
    ceiling, chance, recovered, eta = found.reprefill, found.chance, found.flip_recover, found.eta
    needed, few = chance + SKILL * (1.0 - chance), _few(found.n)
    if ceiling.low < needed:
        unsure = f"{few}: " if needed <= ceiling.high else ""
        return "cannot tell", (
            f"{unsure}re-prefill answers {_show(ceiling)} of the questions, {needed:.2f} is needed to see a "
            f"loss (chance {chance:.2f})"
        )
    if served.mean < -MARGIN:
        return "unsafe", f"{name} KV changes accuracy by {_show(served, sign=True)} against re-prefill"
    if served.low < -MARGIN:
        return "cannot tell", (
            f"{few}: {name} KV changes accuracy by {_show(served, sign=True)}; {FEWEST} that lose nothing "
            f"rule out a loss of {MARGIN}"
        )
    if blind.high < -MARGIN:
        assert recovered is not None, "accuracy is not lost without a changed answer"
        if recovered.mean < FLIPS:
            return "unsafe", f"{name} KV restores {_show(recovered)} of the answers that blind reuse changes"
        if recovered.low < FLIPS:
            return "cannot tell", (
                f"{few}: {name} KV restores {_show(recovered)} of the answers that blind reuse changes, and "
                f"{FLIPS} must be known"
            )
        return "safe", (
            f"{name} KV changes accuracy by {_show(served, sign=True)} and restores {_show(recovered)} "
            "of the answers that blind reuse changes"
        )
    if eta is None or eta.low < ETA:
        shown = "nothing to close" if eta is None else _show(eta)
        return "cannot tell", (
            f"blind reuse answers as well as re-prefill, and η of {name} KV is {shown} where {ETA} would "
            "show that it works: these questions do not reach what this model binds"
        )
    return "safe", (
        f"blind reuse answers as well as re-prefill, so does {name} KV, and it closes {_show(eta)} "
        "of what blind reuse changes in the next token"
    )


def loss(outcomes: Sequence[QuestionOutcome], arm: str) -> Estimate:
    """Change of accuracy from re-prefill to ``arm`` on the same questions; negative is a loss.

    The adjusted Wald interval for matched pairs (Agresti and Min, 2005): half a question is added to
    each cell of the two-by-two table, so that few questions without a loss do not prove its absence.
    """
    lost = sum(o.reprefill == o.truth != getattr(o, arm) for o in outcomes)
    won = sum(o.reprefill != o.truth == getattr(o, arm) for o in outcomes)
    n = len(outcomes) + 2.0
    mean = (won - lost) / n
    spread = _Z * math.sqrt(max(won + lost + 1.0 - (won - lost) ** 2 / n, 0.0)) / n
    return Estimate(mean, mean - spread, mean + spread)


def wilson(hits: Sequence[bool]) -> Estimate:
    """A share with its Wilson score interval, which stays wide for all or none of few."""
    n, share = len(hits), sum(hits) / len(hits)
    middle = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    spread = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n * n))
    # rounding may put the end slightly inside the share
    return Estimate(share, min(middle - spread, share), max(middle + spread, share))


def _few(count: int) -> str:
    return f"{count} question{'' if count == 1 else 's'} {'is' if count == 1 else 'are'} too few"


def _show(estimate: Estimate, sign: bool = False) -> str:
    form = "+.2f" if sign else ".2f"
    return f"{estimate.mean:{form}} ({estimate.low:{form}}..{estimate.high:{form}})"
