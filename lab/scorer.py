"""Questions with known answers to a window, and scores of arms against the re-prefill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kamera.certify import bootstrap, eta, kl
from kamera.engines import Engine
from kamera.trust import Estimate
from kamera.window import KameraWindow

REFERENCE, BLIND = "re-prefill", "blind reuse"


@dataclass(frozen=True)
class OneTokenQuestion:
    """A question whose answer is one token."""

    text: str
    answer: str
    kind: str


@dataclass(frozen=True)
class Score:
    """One row of a table: an arm on one kind of question after one operation."""

    operation: str
    kind: str
    arm: str
    n: int
    accuracy: Estimate
    kl: float
    eta: float
    agreement: float
    flip_recover: float


def answer_logits(window: KameraWindow, questions: Sequence[OneTokenQuestion]) -> list[torch.Tensor]:
    """Next-token logits ``[vocabulary]`` of every question's answer."""
    return [window.next_token_logits(question.text) for question in questions]


@dataclass(frozen=True)
class Judgement:
    """One answer: whether it is right, whether it is the reference's (1.0 or 0.0), and its KL to that."""

    right: float
    agrees: float
    kl: float


class Scorer:
    """Collects answers of several arms to the same questions, and computes the rows of a table."""

    def __init__(self, backbone: Engine) -> None:
        self._backbone = backbone
        self._judged: dict[tuple[str, str, str], list[Judgement]] = {}

    def add(
        self, operation: str, questions: Sequence[OneTokenQuestion], arms: Mapping[str, list[torch.Tensor]]
    ) -> None:
        """Compare every arm's logits with the correct answers and with those of the arm `REFERENCE`."""
        for i, question in enumerate(questions):
            truth, ideal = int(self._backbone.builder.tokenize(question.answer)[0]), arms[REFERENCE][i]
            for arm, answers in arms.items():
                choice = int(answers[i].argmax())
                judged = self._judged.setdefault((operation, question.kind, arm), [])
                agrees = float(choice == int(ideal.argmax()))
                judged.append(Judgement(float(choice == truth), agrees, kl(answers[i], ideal)))

    def scores(self) -> Iterator[Score]:
        """All rows. η and flip-recover are relative to the arm `BLIND`."""
        for (operation, kind, arm), judged in self._judged.items():
            base = self._judged[operation, kind, BLIND]
            flipped = [one.agrees for one, was in zip(judged, base, strict=True) if was.agrees == 0.0]
            kls = [one.kl for one in judged]
            yield Score(
                *(operation, kind, arm, len(judged)),
                accuracy=bootstrap([one.right for one in judged]),
                kl=bootstrap(kls).mean,
                eta=eta(kls, [one.kl for one in base]),
                agreement=bootstrap([one.agrees for one in judged]).mean,
                flip_recover=bootstrap(flipped).mean,
            )
