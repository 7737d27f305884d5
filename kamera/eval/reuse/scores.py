"""Scores of a submission: arms by trace, and whether the benchmark would have seen wrong patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kamera.eval.arms import BLIND, EXACT, SABOTAGE
from kamera.eval.compare import Judgement, compare
from kamera.eval.reuse.frozen import Benchmark
from kamera.eval.reuse.item import Item
from kamera.eval.reuse.scoring import decision, score
from kamera.eval.reuse.submission import Submission
from kamera.eval.tasks.sample import mean
from kamera.eval.trial import Trial
from kamera.trust import Estimate

ALL = "all"


@dataclass(frozen=True)
class TraceScore:
    """An arm on one trace, or on `ALL`.

    ``agreement`` is the share of answers with the decision of ``exact``, ``flip_recover`` the same over the
    answers that ``blind`` changes, ``kl`` the mean KL(arm ‖ exact) of the first token in nats
    (`FirstToken.kl`); intervals are 95 % bootstrap intervals over answers (over items on `ALL`, whose answers
    of one item are averaged). ``recomputed`` is the share of the window's tokens, ``kept`` bytes per byte of
    the window's KV, ``ttft`` the median ratio to ``exact`` of the same item and trace.
    """

    arm: str
    trace: str
    rehearsed: bool
    n: int
    accuracy: Estimate
    agreement: Estimate
    flip_recover: Estimate
    kl: Estimate
    recomputed: float
    kept: float
    ttft: float


@dataclass(frozen=True)
class Caught:
    """Whether the benchmark tells a wrong patch from a right one.

    True if the agreement's interval of the sabotaged arm lies below that of the arm it sabotages.
    """

    sabotage: str
    of: str
    caught: bool


@dataclass(frozen=True)
class Scores:
    """All rows, sabotage, and the lines that could not be compared."""

    items: int
    rows: tuple[TraceScore, ...]
    sabotage: tuple[Caught, ...]
    errors: tuple[str, ...]

    def row(self, arm: str, trace: str = ALL) -> TraceScore:
        """The row of an arm. Raises KeyError."""
        return {(row.arm, row.trace): row for row in self.rows}[arm, trace]

    def document(self) -> dict[str, Any]:
        """Plain values for JSON, nan for undefined ones."""
        return asdict(self)


@dataclass(frozen=True)
class _Pair:
    """A trial next to the reference's of the same item and trace; ``blind`` is that of blind reuse."""

    trial: Trial
    exact: Trial
    judged: Judgement
    blind: Judgement | None


def score_submission(submission: Submission, benchmark: Benchmark) -> Scores:
    """Compare every arm with ``exact``. An item and trace with an error under any arm count under none."""
    answered, errors = submission.answered(), []
    pairs: dict[str, list[_Pair]] = {arm: [] for arm in submission.arms}
    asked = {line.item for line in submission.lines}
    for item in benchmark.items:
        for trace in item.traces if item.id in asked else ():
            own = {arm: answered[item.id, trace.name, arm] for arm in submission.arms}
            if failed := [trial for trial in own.values() if trial.error]:
                errors.append(f"{item.id} / {trace.name} / {failed[0].arm}: {failed[0].error}")
                continue
            exact = own[EXACT]
            judged = {arm: _judge(item, trial, exact) for arm, trial in own.items()}
            for arm, trial in own.items():
                pairs[arm].append(_Pair(trial, exact, judged[arm], judged.get(BLIND)))
    rows = tuple(_rows(pairs, submission))
    return Scores(len(asked), rows, tuple(_caught(rows)), tuple(errors))


def _judge(item: Item, trial: Trial, exact: Trial) -> Judgement:
    agrees = decision(trial.answer, item) == decision(exact.answer, item)
    assert trial.first_token is not None and exact.first_token is not None, "trials without errors have both"
    kl = trial.first_token.kl_to(exact.first_token)
    return Judgement(item.id, score(trial.answer, item), float(agrees), kl)


def _rows(pairs: dict[str, list[_Pair]], submission: Submission) -> Iterator[TraceScore]:
    per_token = float(submission.system["kv_bytes_per_token"])
    for arm, own in pairs.items():
        for trace in (ALL, *dict.fromkeys(pair.trial.trace for pair in own)):
            some = [pair for pair in own if trace in (ALL, pair.trial.trace)]
            if not some:
                continue
            blind = [pair.blind for pair in some if pair.blind is not None]
            means, spent = compare([pair.judged for pair in some], blind), [pair.trial for pair in some]
            yield TraceScore(
                *(arm, trace, submission.arms[arm], len(some)),
                *(means.accuracy, means.agreement, means.flip_recover, means.kl),
                recomputed=mean([one.recomputed_tokens / one.window_tokens for one in spent]),
                kept=mean([one.kept_bytes / (one.window_tokens * per_token) for one in spent]),
                ttft=median(pair.trial.ttft_seconds / pair.exact.ttft_seconds for pair in some),
            )


def _caught(rows: Sequence[TraceScore]) -> Iterator[Caught]:
    whole = {row.arm: row for row in rows if row.trace == ALL}
    for arm, row in whole.items():
        for name in SABOTAGE:
            of = arm.replace(name, "patch", 1)
            if arm.startswith(name) and of in whole:
                yield Caught(arm, of, row.agreement.high < whole[of].agreement.low)
