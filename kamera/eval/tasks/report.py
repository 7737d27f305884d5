"""Results of a benchmark run: scores, fidelity to the re-prefill, costs, and problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kamera.certify import bootstrap, eta_interval
from kamera.eval.arms import BLIND, NATIVE, REPREFILL, SABOTAGE
from kamera.eval.first_token import FirstToken
from kamera.eval.tasks.sample import Answered, Problem, Summary, Task, mean, means_by
from kamera.eval.trial import Trial
from kamera.trust import Estimate


@dataclass(frozen=True)
class ArmResult:
    """One arm over all items.

    ``summary`` holds the official score, the plain mean, and the agreement by subtask; ``interval`` is the
    mean's 95 % bootstrap interval over items: answers to one item behind several windows are averaged.
    ``agreement`` is the share of items with the decision (`Task.decision`) of the re-prefill,
    ``native_agreement`` with that of the unsplit prompt without Kamera; ``flip_recover`` is the agreement
    over the items where blind reuse differs. All three are nan without such items or without these arms.
    ``first_token_kl`` is the mean KL(arm ‖ re-prefill) of the answers' first token (`FirstToken.kl_to`), over
    the compared items; ``eta`` is 1 − that / that of blind reuse, over items that both answered (nan if blind
    reuse was not asked or loses nothing), with its 95 % interval. Costs are means over items, from stored
    canonicals on: ``seconds`` to the first token, ``answer_seconds`` to the last; ``kv_share`` is bytes of
    patches per byte of the prompt's KV, ``reused_tokens`` and ``live_tokens`` are the prompt's.
    """

    arm: str
    summary: Summary
    interval: Estimate
    agreement: float
    native_agreement: float
    flip_recover: float
    first_token_kl: float
    eta: Estimate
    seconds: float
    answer_seconds: float
    forwards: float
    tokens_recomputed: float
    reused_tokens: float
    live_tokens: float
    kv_share: float


@dataclass(frozen=True)
class Results:
    """A finished run: one row per arm, and all problems of the data.

    ``notes`` counts the items that were cut, over-length or out of memory, per arm and note. ``unseen`` are
    arms with wrong patches whose agreement is not below that of the arm they imitate, and that arm: these
    items cannot tell a wrong patch from a right one.
    """

    task: str
    items: int
    labelled: int
    arms: tuple[ArmResult, ...]
    notes: tuple[tuple[str, str, int], ...]
    problems: tuple[Problem, ...]
    unseen: tuple[tuple[str, str], ...] = ()

    @property
    def skipped(self) -> int:
        return sum(problem.skipped for problem in self.problems)

    def document(self) -> dict[str, Any]:
        """Plain values, nan for undefined ones."""
        notes = [{"arm": arm, "note": note, "items": count} for arm, note, count in self.notes]
        return {**asdict(self), "skipped": self.skipped, "notes": notes}

    def arm(self, name: str) -> ArmResult:
        """The row of an arm. Raises KeyError."""
        return {row.arm: row for row in self.arms}[name]


def results_of_run(
    task: Task,
    answered: Mapping[str, Sequence[Answered]],
    trials: Sequence[Trial],
    problems: Sequence[Problem],
) -> Results:
    """The results of a run from every arm's answers (in equal order) and the trials of all items."""
    decisions = {
        arm: [task.decision(a.response, a.sample) for a in of_arm] for arm, of_arm in answered.items()
    }
    own = {arm: [trial for trial in trials if trial.arm == arm] for arm in answered}
    ideals = {t.item: t.first_token for t in own.get(REPREFILL, ())}
    lost = {arm: [_kl(t, ideals.get(t.item)) for t in of_arm] for arm, of_arm in own.items()}
    agrees = {arm: _agreement(decided, decisions.get(REPREFILL)) for arm, decided in decisions.items()}
    agreement: dict[str, Estimate] = {}
    rows = []
    for arm, of_arm in answered.items():
        some = own[arm]
        items = [a.sample.meta.get("item", t.item) for a, t in zip(of_arm, some, strict=True)]
        agreement[arm] = _interval(items, agrees[arm])
        blind = agrees.get(BLIND, [None] * len(of_arm))
        flipped = [now if was == 0.0 else None for now, was in zip(agrees[arm], blind, strict=True)]
        native = _agreement(decisions[arm], decisions.get(NATIVE))
        kv_bytes = sum(t.kv_bytes for t in some)
        rows.append(
            ArmResult(
                arm=arm,
                summary=_with_agreement(task.summarize(of_arm), of_arm, agrees[arm]),
                interval=_interval(items, [a.score for a in of_arm]),
                agreement=agreement[arm].mean,
                native_agreement=mean([same for same in native if same is not None]),
                flip_recover=_interval(items, flipped).mean,
                first_token_kl=_interval(items, lost[arm]).mean,
                eta=_eta(items, lost[arm], lost.get(BLIND, [])),
                seconds=mean([t.ttft_seconds for t in some]),
                answer_seconds=mean([t.answer_seconds for t in some]),
                forwards=mean([t.forwards + t.live_forwards for t in some]),
                tokens_recomputed=mean([t.computed_tokens for t in some]),
                reused_tokens=mean([t.window_tokens - round(t.recomputed_tokens) for t in some]),
                live_tokens=mean([t.question_tokens + t.computed_tokens for t in some]),
                kv_share=sum(t.patch_bytes for t in some) / kv_bytes if kv_bytes else 0.0,
            )
        )
    first = next(iter(answered.values()))
    notes = Counter((t.arm, t.note) for t in trials if t.note)
    return Results(
        task=task.name,
        items=len(first),
        labelled=sum(a.score is not None for a in first),
        arms=tuple(rows),
        notes=tuple((*key, count) for key, count in sorted(notes.items())),
        problems=tuple(problems),
        unseen=tuple(_unseen(agreement)),
    )


def _interval(items: Sequence[str], values: Sequence[float | None]) -> Estimate:
    """Mean over items with its interval: the answers to one behind several traces are not independent."""
    pairs = ((item, value) for item, value in zip(items, values, strict=True) if value is not None)
    return bootstrap([cell.score for cell in means_by("item", pairs)])


def _eta(items: Sequence[str], ours: Sequence[float | None], blind: Sequence[float | None]) -> Estimate:
    """η with its interval, over means of items: answers to one behind several traces are drawn together."""
    rows = [(i, a, b) for i, a, b in zip(items, ours, blind, strict=False) if a is not None and b is not None]
    pairs = ([(item, row[n]) for item, *row in rows] for n in (0, 1))
    arm, base = ([cell.score for cell in means_by("item", one)] for one in pairs)
    return eta_interval(arm, base)


def _with_agreement(summary: Summary, of_arm: Sequence[Answered], agrees: Sequence[float | None]) -> Summary:
    pairs = zip(of_arm, agrees, strict=True)
    agreed = means_by("subtask, agreement", ((a.sample.task, same) for a, same in pairs if same is not None))
    return replace(summary, groups=(*summary.groups, *agreed)) if len(agreed) > 1 else summary


def _unseen(agreement: Mapping[str, Estimate]) -> Iterator[tuple[str, str]]:
    for arm, wrong in agreement.items():
        for name in SABOTAGE:
            right = agreement.get(arm.replace(name, "patch", 1)) if arm.startswith(name) else None
            if right is not None and not wrong.high < right.low:
                yield arm, arm.replace(name, "patch", 1)


def _agreement(decisions: Sequence[str], ideal: Sequence[str] | None) -> list[float | None]:
    """1.0 where two arms decide alike, else 0.0; None without the other arm."""
    if ideal is None:
        return [None] * len(decisions)
    return [float(a == b) for a, b in zip(decisions, ideal, strict=True)]


def _kl(trial: Trial, ideal: FirstToken | None) -> float | None:
    return None if trial.first_token is None or ideal is None else trial.first_token.kl_to(ideal)
