"""Results of a benchmark run: scores, fidelity to the re-prefill, costs, and problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kamera.eval.arms import BLIND, NATIVE, REPREFILL, SABOTAGE
from kamera.eval.compare import Judgement, compare
from kamera.eval.first_token import FirstToken
from kamera.eval.tasks.sample import Answered, Problem, Summary, Task, grouped, mean
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
    the compared items. Costs are means over items, from stored canonicals on: ``seconds`` to the first token,
    ``answer_seconds`` to the last; ``kv_share`` is bytes of patches per byte of the prompt's KV,
    ``reused_tokens`` and ``live_tokens`` are the prompt's.
    """

    arm: str
    summary: Summary
    interval: Estimate
    agreement: float
    native_agreement: float
    flip_recover: float
    first_token_kl: float
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
        """Samples and files that were left out."""
        return sum(problem.skipped for problem in self.problems)

    def document(self) -> dict[str, Any]:
        """Plain values for JSON, nan for undefined ones."""
        return {
            "task": self.task,
            "items": self.items,
            "labelled": self.labelled,
            "skipped": self.skipped,
            "arms": [asdict(arm) for arm in self.arms],
            "notes": [{"arm": arm, "note": note, "items": count} for arm, note, count in self.notes],
            "problems": [asdict(problem) for problem in self.problems],
            "unseen": [list(pair) for pair in self.unseen],
        }

    def arm(self, name: str) -> ArmResult:
        """The row of an arm. Raises KeyError."""
        return {row.arm: row for row in self.arms}[name]


def collect(
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
    judged = {
        arm: [
            Judgement(a.sample.meta.get("item", t.item), a.score, agrees, _kl(t, ideals.get(t.item)))
            for t, a, agrees in zip(
                own[arm], of_arm, _agreement(decisions[arm], decisions.get(REPREFILL)), strict=True
            )
        ]
        for arm, of_arm in answered.items()
    }
    compared = {arm: compare(of_arm, judged.get(BLIND, ())) for arm, of_arm in judged.items()}
    rows = []
    for arm, of_arm in answered.items():
        some, means = own[arm], compared[arm]
        natively = _agreement(decisions[arm], decisions.get(NATIVE))
        kv_bytes = sum(t.kv_bytes for t in some)
        rows.append(
            ArmResult(
                arm=arm,
                summary=_with_agreement(task.summarize(of_arm), of_arm, judged[arm]),
                interval=means.accuracy,
                agreement=means.agreement.mean,
                native_agreement=mean([same for same in natively if same is not None]),
                flip_recover=means.flip_recover.mean,
                first_token_kl=means.kl.mean,
                seconds=mean([t.ttft_seconds for t in some]),
                answer_seconds=mean([t.answer_seconds for t in some]),
                forwards=mean([t.forwards + t.live_forwards for t in some]),
                tokens_recomputed=mean([t.computed_tokens for t in some]),
                reused_tokens=mean([t.tokens - t.question_tokens - t.computed_tokens for t in some]),
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
        unseen=tuple(_unseen({arm: means.agreement for arm, means in compared.items()})),
    )


def _with_agreement(summary: Summary, of_arm: Sequence[Answered], judged: Sequence[Judgement]) -> Summary:
    """The summary, and the agreement by trace, or by subtask if there are no traces and several subtasks."""
    by = "trace" if of_arm and "trace" in of_arm[0].sample.meta else "subtask"
    labels = [a.sample.meta.get("trace", a.sample.task) for a in of_arm]
    known = [(label, j.agrees) for label, j in zip(labels, judged, strict=True) if j.agrees is not None]
    scores = [(label, a.score) for label, a in zip(labels, of_arm, strict=True) if a.score is not None]
    found = (*(grouped("trace", scores) if by == "trace" else ()), *grouped(f"{by}, agreement", known))
    return replace(summary, groups=(*summary.groups, *found)) if len(found) > 1 else summary


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
