"""Scores of a submission: arms by trace, and whether the benchmark would have seen wrong patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from kamera.certify import Interval, bootstrap
from kamera.eval.reuse.arms import SABOTAGE
from kamera.eval.reuse.frozen import Benchmark
from kamera.eval.reuse.item import Item
from kamera.eval.reuse.plain import BLIND, EXACT
from kamera.eval.reuse.scoring import decision, score
from kamera.eval.reuse.submission import Line, Submission

ALL = "all"


@dataclass(frozen=True)
class Row:
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
    accuracy: Interval
    agreement: Interval
    flip_recover: Interval
    kl: Interval
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
    rows: tuple[Row, ...]
    sabotage: tuple[Caught, ...]
    errors: tuple[str, ...]

    def row(self, arm: str, trace: str = ALL) -> Row:
        """The row of an arm. Raises KeyError."""
        return {(row.arm, row.trace): row for row in self.rows}[arm, trace]

    def document(self) -> dict[str, Any]:
        """Plain values for JSON, nan for undefined ones."""
        return asdict(self)


@dataclass(frozen=True)
class _Judged:
    item: str
    trace: str
    right: float | None
    agree: float
    blind_agrees: float | None
    kl: float
    recomputed: float
    kept: float
    ttft: float


def score_submission(submission: Submission, benchmark: Benchmark) -> Scores:
    """Compare every arm with ``exact``. An item and trace with an error under any arm count under none."""
    answered, errors = submission.answered(), []
    judged: dict[str, list[_Judged]] = {arm: [] for arm in submission.arms}
    items = {line.item for line in submission.lines}
    for item in benchmark.items:
        for trace in item.traces if item.id in items else ():
            lines = {arm: answered[item.id, trace.name, arm] for arm in submission.arms}
            if failed := [line for line in lines.values() if line.error]:
                errors.append(f"{item.id} / {trace.name} / {failed[0].arm}: {failed[0].error}")
                continue
            for arm, line in lines.items():
                per_token = float(submission.system["kv_bytes_per_token"])
                judged[arm].append(_judge(item, line, lines[EXACT], lines.get(BLIND), per_token))
    rows = tuple(_rows(judged, submission))
    return Scores(len(items), rows, tuple(_caught(rows)), tuple(errors))


def _judge(item: Item, line: Line, exact: Line, blind: Line | None, per_token: float) -> _Judged:
    wanted = decision(exact.answer, item)
    assert line.first_token is not None and exact.first_token is not None, "lines without errors have both"
    return _Judged(
        item.id,
        line.trace,
        score(line.answer, item),
        float(decision(line.answer, item) == wanted),
        None if blind is None else float(decision(blind.answer, item) == wanted),
        line.first_token.kl_to(exact.first_token),
        line.recomputed_tokens / line.window_tokens,
        line.kept_bytes / (line.window_tokens * per_token),
        line.ttft_seconds / exact.ttft_seconds,
    )


def _rows(judged: dict[str, list[_Judged]], submission: Submission) -> Iterator[Row]:
    for arm, found in judged.items():
        for trace in (ALL, *dict.fromkeys(one.trace for one in found)):
            some = [one for one in found if trace in (ALL, one.trace)]
            if some:
                yield _row(arm, trace, submission.arms[arm], some)


def _row(arm: str, trace: str, rehearsed: bool, some: Sequence[_Judged]) -> Row:
    flipped = [one for one in some if one.blind_agrees == 0.0]
    return Row(
        arm,
        trace,
        rehearsed,
        len(some),
        _interval([(one.item, one.right) for one in some if one.right is not None]),
        _interval([(one.item, one.agree) for one in some]),
        _interval([(one.item, one.agree) for one in flipped]),
        _interval([(one.item, one.kl) for one in some]),
        sum(one.recomputed for one in some) / len(some),
        sum(one.kept for one in some) / len(some),
        median(one.ttft for one in some),
    )


def _interval(values: Sequence[tuple[str, float]]) -> Interval:
    """Over items: the answers of one are not independent."""
    by_item: dict[str, list[float]] = {}
    for item, value in values:
        by_item.setdefault(item, []).append(value)
    return bootstrap([sum(some) / len(some) for some in by_item.values()])


def _caught(rows: Sequence[Row]) -> Iterator[Caught]:
    whole = {row.arm: row for row in rows if row.trace == ALL}
    for arm, row in whole.items():
        for name in SABOTAGE:
            of = arm.replace(name, "patch", 1)
            if arm.startswith(name) and of in whole:
                yield Caught(arm, of, row.agreement.high < whole[of].agreement.low)
