"""Questions with known answers to a window, and scores of arms against the re-prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kamera.certify import Interval, bootstrap, eta, kl
from kamera.window import KameraWindow


@dataclass(frozen=True)
class Item:
    """A question whose answer is one token."""

    text: str
    answer: str
    kind: str


@dataclass(eq=False)
class Outcomes:
    """Outcomes of one arm, item by item."""

    right: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agree: list[float] = field(default_factory=list)  # 1.0: same answer as the re-prefill


@dataclass(frozen=True)
class Score:
    """One row of a table: an arm on one kind of question after one operation."""

    operation: str
    kind: str
    arm: str
    n: int
    accuracy: Interval
    kl: float
    eta: float
    agreement: float
    flip_recover: float


def answer_logits(window: KameraWindow, items: Sequence[Item]) -> list[torch.Tensor]:
    """Next-token logits of every item's answer."""
    return [window.next_token_logits(item.text) for item in items]


class Scorer:
    """Collects outcomes of several arms on the same items, and computes the rows of a table."""

    def __init__(self, tokenize: Callable[[str], torch.Tensor]) -> None:
        self._tokenize = tokenize
        self._outcomes: dict[tuple[str, str, str], Outcomes] = {}

    def add(
        self,
        operation: str,
        items: Sequence[Item],
        arms: dict[str, list[torch.Tensor]],
        reference: str = "re-prefill",
    ) -> None:
        """Compare every arm's logits on ``items`` with the correct answers and the reference arm."""
        for i, item in enumerate(items):
            truth = int(self._tokenize(item.answer)[0])
            ideal = arms[reference][i]
            for arm, logits in arms.items():
                out = self._outcomes.setdefault((operation, item.kind, arm), Outcomes())
                choice = int(logits[i].argmax())
                out.right.append(float(choice == truth))
                out.agree.append(float(choice == int(ideal.argmax())))
                out.kl.append(kl(logits[i], ideal))

    def scores(self, blind: str = "blind reuse") -> list[Score]:
        """All rows. η and flip-recover are relative to the arm called ``blind``."""
        rows = []
        for (operation, kind, arm), out in self._outcomes.items():
            base = self._outcomes[(operation, kind, blind)]
            flipped = [i for i, same in enumerate(base.agree) if not same]
            recovered = [out.agree[i] for i in flipped]
            rows.append(
                Score(
                    operation,
                    kind,
                    arm,
                    len(out.right),
                    bootstrap(out.right),
                    sum(out.kl) / len(out.kl),
                    eta(out.kl, base.kl),
                    sum(out.agree) / len(out.agree),
                    sum(recovered) / len(recovered) if recovered else float("nan"),
                )
            )
        return rows
