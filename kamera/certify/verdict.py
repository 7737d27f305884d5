"""From a probe's answers to a verdict: every rule of it, with its constant and the reason for that.

* Re-prefill must answer well (`SKILL`), or nothing it loses can be seen: "cannot tell".
* Patched KV must not answer worse than re-prefill by more than `MARGIN`: "unsafe" when it does, and
  "cannot tell" while there are too few questions to know.
* Where blind reuse changes answers, the patch must restore them (`FLIPS`).
* Where it changes none (a model that reads both chunks while it answers), answers cannot show that
  the patch does anything: a patch of zeros would pass. Then it must close the gap in the distribution
  of the next token (`ETA`). If even that is not seen the probe does not reach what this model binds:
  "cannot tell". It is not called safe, as other questions may bind where these did not.

The error of each rule is on the side of not serving: an interval must lie on the right side whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kamera.certify.metrics import eta_interval
from kamera.window import Estimate, Verdict

SKILL = 0.5
"""Least share of the way from chance to perfect that re-prefill's answers must reach. With it, `MARGIN`
is at most a tenth of what the model could lose."""

MARGIN = 0.05
"""Loss of accuracy that passes as none. About 40 questions show that much when none is lost, 120 when
two are; the failure this guards against halves accuracy (paper, section 1)."""

FLIPS = 0.8
"""Least share of blind reuse's changed answers that the patch must restore. The paper's patch restores
0.96 of them, the repairs that recompute tokens 0.21 to 0.44 (section 6)."""

ETA = 0.5
"""Least η when no answer changes: more than half of the gap closed. The paper's rank-32 patch closes
about 0.8 to 0.9 (section 3); a broken one is near 0 or below."""

_Z = 1.959964  # two-sided 95 %


@dataclass(frozen=True)
class Outcome:
    """One question: what each arm answered ("" for none of the options), and how far it was off.

    The divergences are KL to the re-prefill's next-token distribution, in nats.
    """

    truth: str
    reprefill: str
    blind: str
    patched: str
    blind_kl: float
    patched_kl: float


@dataclass(frozen=True)
class Judgement:
    """What the answers show, and the verdict on it."""

    reprefill: Estimate
    blind: Estimate
    patched: Estimate
    eta: Estimate | None
    flip_recover: Estimate | None
    verdict: Verdict
    reason: str


def judge(outcomes: Sequence[Outcome], chance: float) -> Judgement:
    """Judge the patch by the questions answered; a guess is right with probability ``chance``."""
    if not outcomes:
        raise ValueError("no question was asked: there is nothing to judge")
    accuracy = {
        arm: wilson([getattr(o, arm) == o.truth for o in outcomes])
        for arm in ("reprefill", "blind", "patched")
    }
    flipped = [o for o in outcomes if o.blind != o.reprefill]
    recovered = wilson([o.patched == o.reprefill for o in flipped]) if flipped else None
    share = eta_interval([o.patched_kl for o in outcomes], [o.blind_kl for o in outcomes])
    closed = None if math.isnan(share.mean) else Estimate(share.mean, share.low, share.high)
    verdict, reason = _verdict(outcomes, accuracy["reprefill"], chance, recovered, closed)
    return Judgement(**accuracy, eta=closed, flip_recover=recovered, verdict=verdict, reason=reason)


def _verdict(
    outcomes: Sequence[Outcome],
    ceiling: Estimate,
    chance: float,
    recovered: Estimate | None,
    closed: Estimate | None,
) -> tuple[Verdict, str]:
    needed = chance + SKILL * (1.0 - chance)
    if ceiling.low < needed:
        return "cannot tell", (
            f"re-prefill answers {_show(ceiling)} of the questions, {needed:.2f} is needed to see a loss "
            f"(chance {chance:.2f})"
        )
    patch, blind = (loss(outcomes, arm) for arm in ("patched", "blind"))
    if patch.mean < -MARGIN:
        return "unsafe", f"patched reuse changes accuracy by {_show(patch, sign=True)} against re-prefill"
    if patch.low < -MARGIN:
        return "cannot tell", (
            f"patched reuse changes accuracy by {_show(patch, sign=True)}: more questions are needed to "
            f"rule out a loss of {MARGIN}"
        )
    if blind.high < -MARGIN:
        assert recovered is not None, "accuracy is not lost without a changed answer"
        if recovered.mean < FLIPS:
            return "unsafe", f"the patch restores {_show(recovered)} of the answers that blind reuse changes"
        if recovered.low < FLIPS:
            return "cannot tell", (
                f"the patch restores {_show(recovered)} of the answers that blind reuse changes: more "
                f"questions are needed to know that it is {FLIPS}"
            )
        return "safe", (
            f"patched reuse changes accuracy by {_show(patch, sign=True)} and restores {_show(recovered)} "
            "of the answers that blind reuse changes"
        )
    if closed is None or closed.low < ETA:
        shown = "nothing to close" if closed is None else _show(closed)
        return "cannot tell", (
            f"blind reuse answers as well as re-prefill, and η of the patch is {shown} where {ETA} would "
            "show that it works: these questions do not reach what this model binds"
        )
    return "safe", (
        f"blind reuse answers as well as re-prefill, so does patched, and the patch closes {_show(closed)} "
        "of what blind reuse changes in the next token"
    )


def loss(outcomes: Sequence[Outcome], arm: str) -> Estimate:
    """Change of accuracy from re-prefill to ``arm`` on the same questions; negative is a loss.

    The adjusted Wald interval for matched pairs (Agresti and Min, 2005): half a question is added to
    each cell of the two-by-two table, so that no loss among few questions is no proof.
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
    # rounding may put the end a hair inside the share
    return Estimate(share, min(middle - spread, share), max(middle + spread, share))


def _show(estimate: Estimate, sign: bool = False) -> str:
    form = "+.2f" if sign else ".2f"
    return f"{estimate.mean:{form}} ({estimate.low:{form}}..{estimate.high:{form}})"
