"""The paper's claims on today's operators: a row for each, with what was measured and whether it holds.

Held-out episodes of the testbed's world: an items frame is served behind three frames that bind what it
means, in every way that a claim speaks of; all else is exact.
η = 1 − KL(arm ‖ re-prefill) / KL(blind ‖ re-prefill).
Intervals: 95 %, bootstrap over questions or windows.

    python -m benchmarks.paper [--model testbed] [--windows 42] [--sabotage no-rotation]

``--model`` takes a model directory whose pictures are the testbed's. A claim that does not change with
``--sabotage`` says nothing of the operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from benchmarks import intervals, report
from benchmarks.intervals import Estimate
from benchmarks.paper.bed import Bed
from benchmarks.paper.measured import RANK, RANKS, Found, measure
from kamera import Backbone


class Claim(NamedTuple):
    """What the paper says, the figure that judges it, and when it holds."""

    text: str
    paper: str
    figure: Callable[[Found], Estimate]
    holds: Callable[[float], bool]
    asks: str


def _lost(found: Found, kind: str = "") -> Estimate:
    whole = found.accuracy(f"re-prefill{kind}").mean
    blind = found.accuracy(f"blind{kind}")
    return Estimate(whole - blind.mean, whole - blind.high, whole - blind.low)


def _full_at(found: Found) -> Estimate:
    """The bytes of the smallest patch that answers as often as the re-prefill."""
    enough = found.accuracy("re-prefill").mean - 0.02
    ranks = [rank for rank in RANKS if found.accuracy(f"patch {rank}").mean >= enough]
    return found.number(f"bytes {ranks[0]}") if ranks else Estimate(float("inf"), 0.0, float("inf"))


def _saturates(found: Found) -> Estimate:
    """What rank 32 gives of what rank 64 gives."""
    of, whole = found.eta("patch 32"), found.eta("patch 64").mean
    return Estimate(of.mean / whole, of.low / whole, of.high / whole)


def _behind_exact(found: Found) -> Estimate:
    exact, orbit = found.eta(f"patch {RANK}").mean, found.eta("orbit")
    return Estimate(exact - orbit.mean, exact - orbit.high, exact - orbit.low)


def _kl(found: Found) -> Estimate:
    return intervals.mean(found.kl["survivor"])


CLAIMS = (
    Claim("Blind reuse breaks multi-hop answers", "0.74 → 0.38", _lost, lambda x: x > 0.1, "> .1 lost"),
    Claim(
        "One-hop answers survive it",
        "0.57 → 0.57",
        lambda f: _lost(f, ", one hop"),
        lambda x: abs(x) <= 0.02,
        "≤ .02 lost",
    ),
    Claim(
        "The deficit grows with depth (relative norm, last over first layer)",
        "0.08 → 0.49",
        lambda f: f.number("deficit, last over first layer"),
        lambda x: x >= 2,
        "≥ 2",
    ),
    Claim(
        "It is low-rank: directions for 90 % of the energy, over tokens",
        "≤ 0.30",
        lambda f: f.number("directions"),
        lambda x: x <= 0.3,
        "≤ .30",
    ),
    Claim(
        "It is spread over tokens: share that holds 90 % of ‖Δ‖²",
        "about half",
        lambda f: f.number("tokens"),
        lambda x: x >= 0.5,
        "≥ .5",
    ),
    Claim(
        "A rank-64 patch closes the gap (η)",
        "0.85–0.96",
        lambda f: f.eta("patch 64"),
        lambda x: x >= 0.85,
        "≥ .85",
    ),
    Claim("Rank 32 gives what rank 64 gives", "94 %", _saturates, lambda x: x >= 0.94, "≥ .94"),
    Claim(
        "Bytes of the chunk's KV at which accuracy is full",
        "6 % to 25 %",
        _full_at,
        lambda x: x <= 0.25,
        "≤ .25",
    ),
    Claim(
        "An orbit patch is as good as the ordering's own (η behind)",
        "0.92 against 0.94",
        _behind_exact,
        lambda x: x <= 0.11,
        "≤ .11",
    ),
    Claim(
        "A fresh patch after recall (η)",
        "0.81–0.96",
        lambda f: f.eta(f"patch {RANK}"),
        lambda x: x >= 0.81,
        "≥ .81",
    ),
    Claim(
        "A stale patch after full turnover harms (η)",
        "down to −2.85",
        lambda f: f.eta("stale, 3 replaced"),
        lambda x: x < 0.3,
        "< .3",
    ),
    Claim(
        "A stale patch with one of three replaced (η)",
        "0.77",
        lambda f: f.eta("stale, 1 replaced"),
        lambda x: x >= 0.7,
        "≥ .7",
    ),
    Claim("Survivors kept as they are (KL)", "0.015–0.023", _kl, lambda x: x <= 0.05, "≤ .05"),
    Claim(
        "A stale patch behind three distractors (η)",
        "0.08",
        lambda f: f.eta("distractors, stale", "distractors, blind"),
        lambda x: x <= 0.5,
        "≤ .5",
    ),
    Claim(
        "A fresh patch behind three distractors (η)",
        "about 0.92",
        lambda f: f.eta("distractors, fresh", "distractors, blind"),
        lambda x: x >= 0.9,
        "≥ .9",
    ),
    Claim(
        "The deeper half of the layers does most of it (η)",
        "about 95 %",
        lambda f: f.eta("deeper half"),
        lambda x: x >= 0.95,
        "≥ .95",
    ),
)


def rows(found: Found) -> list[report.Row]:
    """A row for each claim."""
    made: list[report.Row] = []
    for claim in CLAIMS:
        is_ = claim.figure(found)
        row = {"claim": claim.text, "paper": claim.paper, "asked": claim.asks}
        made.append({**row, "measured": str(is_), "holds": claim.holds(is_.mean)})
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = report.parser("paper", __doc__)
    parser.add_argument("--model", default="testbed")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--windows", type=int, default=42, help="episodes, of at most 12 questions each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sabotage", choices=["no-rotation", "other-rows"], default="")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # threads change the order of sums
    backbone = Backbone.from_pretrained(options.model, dtype=options.dtype).engine
    found = measure(Bed(backbone, options.sabotage), options.windows, options.seed)
    arms = {arm: str(found.eta(arm)) for arm in found.kl if "distractors" not in arm and "hop" not in arm}
    n = len(found.right["blind"])
    title = f"{n} multi-hop questions in {options.windows} windows of {options.model}"
    report.tell(options, title, rows(found), questions=n, eta=arms)
    return 0


if __name__ == "__main__":
    sys.exit(main())
