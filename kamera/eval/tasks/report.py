"""Results of a benchmark run: scores, fidelity to the re-prefill, costs, and problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kamera.certify import Interval, bootstrap
from kamera.eval.tasks.arms import BLIND, NATIVE, REFERENCE
from kamera.eval.tasks.journal import Line
from kamera.eval.tasks.sample import Answered, Problem, Summary, Task, mean


@dataclass(frozen=True)
class ArmResult:
    """One arm over all items.

    ``summary`` holds the official score and the plain mean, ``interval`` the mean's 95 % bootstrap
    interval. ``agreement`` is the share of items with the decision (`Task.decision`) of the re-prefill,
    ``native_agreement`` with that of the unsplit prompt without Kamera; ``flip_recover`` is the agreement
    over the items where blind reuse differs. All three are nan without such items or without these arms.
    ``first_token_kl`` is the mean KL(arm ‖ re-prefill) of the answers' first token (`FirstToken.kl`), over
    the compared items. Costs are means over items of filling the window from stored canonicals:
    ``kv_share`` is bytes of patches per byte of the chunks' KV, ``reused_tokens`` and ``live_tokens`` are
    the prompt's.
    """

    arm: str
    summary: Summary
    interval: Interval
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

    ``notes`` counts the items that were cut, over-length or out of memory, per arm and note.
    """

    task: str
    items: int
    labelled: int
    arms: tuple[ArmResult, ...]
    notes: tuple[tuple[str, str, int], ...]
    problems: tuple[Problem, ...]

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
        }

    def arm(self, name: str) -> ArmResult:
        """The row of an arm. Raises KeyError."""
        return {row.arm: row for row in self.arms}[name]


def collect(
    task: Task,
    answered: Mapping[str, Sequence[Answered]],
    lines: Sequence[Line],
    problems: Sequence[Problem],
) -> Results:
    """The results of a run from every arm's answers (in equal order) and the lines of all items."""
    decisions = {
        arm: [task.decision(a.response, a.sample) for a in of_arm] for arm, of_arm in answered.items()
    }
    ideal = decisions.get(REFERENCE)
    flipped = (
        [i for i, b in enumerate(decisions[BLIND]) if b != ideal[i]] if ideal and BLIND in decisions else []
    )
    rows = []
    for arm, of_arm in answered.items():
        own = [line for line in lines if line.arm == arm]
        same = [float(a == b) for a, b in zip(decisions[arm], ideal, strict=True)] if ideal else []
        kv_bytes = sum(line.kv_bytes for line in own)
        rows.append(
            ArmResult(
                arm=arm,
                summary=task.summarize(of_arm),
                interval=bootstrap([a.score for a in of_arm if a.score is not None]),
                agreement=mean(same),
                native_agreement=mean(
                    [float(a == b) for a, b in zip(decisions[arm], decisions.get(NATIVE, ()), strict=False)]
                ),
                flip_recover=mean([same[i] for i in flipped]),
                first_token_kl=mean([x.first_token_kl for x in own if x.first_token_kl is not None]),
                seconds=mean([line.seconds for line in own]),
                answer_seconds=mean([line.answer_seconds for line in own]),
                forwards=mean([line.forwards for line in own]),
                tokens_recomputed=mean([line.tokens_recomputed for line in own]),
                reused_tokens=mean([line.reused_tokens for line in own]),
                live_tokens=mean([line.live_tokens for line in own]),
                kv_share=sum(line.bytes for line in own) / kv_bytes if kv_bytes else 0.0,
            )
        )
    first = next(iter(answered.values()))
    notes = Counter((line.arm, line.note) for line in lines if line.note)
    return Results(
        task=task.name,
        items=len(first),
        labelled=sum(a.score is not None for a in first),
        arms=tuple(rows),
        notes=tuple((*key, count) for key, count in sorted(notes.items())),
        problems=tuple(problems),
    )
