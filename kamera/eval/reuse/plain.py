"""Arms without a patch: everything prefilled anew, a prefix cache, and blind reuse."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kamera.engines import Span
from kamera.eval.adapter import Answer, Question, Unit
from kamera.eval.desk import Desk, Placing
from kamera.ops import kv_bytes

EXACT, BLIND = "exact", "blind"


class Exact(Placing):
    """Everything is prefilled anew when it is asked about: windows in between cost nothing."""

    name = EXACT

    def place(self, order: Sequence[str]) -> None:
        """Note the order."""
        self.order, self.shown = tuple(order), None

    def ask(self, question: Question) -> Answer:
        """Prefill the window, then answer."""
        started = time.perf_counter()
        super().place(self.order)
        spent = time.perf_counter() - started
        made = super().ask(question)
        seconds = made.first_token_seconds + spent
        return Answer(made.text, made.logits, seconds, self.recomputed, 0, made.window_tokens, self.forwards)

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """One forward per unit."""
        return prefilled_behind(self, order, [])


class Prefix(Placing):
    """The units with which both the last window and this one begin are kept."""

    name = "prefix"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._last: tuple[str, ...] = ()
        self._spans: list[Span] = []

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """The common prefix as it stands, one forward for each unit behind it."""
        same = next(
            (i for i, (a, b) in enumerate(zip(self._last, order, strict=False)) if a != b),
            min(len(self._last), len(order)),
        )
        self._spans = prefilled_behind(self, order, self._spans[:same])
        self._last, self.kept = order, sum(kv_bytes(span.kv) for span in self._spans)
        return self._spans


class Blind(Placing):
    """Canonicals at their places."""

    name = BLIND

    def encode(self, unit: Unit) -> None:
        """Encode the unit and compute its canonical."""
        super().encode(unit)
        self.desk.canonical(unit.name)

    def spans(self, order: tuple[str, ...]) -> list[Span]:
        """Rotations only."""
        places, held = self.desk.places(order), [self.desk.canonical(name) for name in order]
        self.kept = sum(kv_bytes(one.kv) for one in held)
        return [self.desk.moved(*each) for each in zip(order, held, places, strict=True)]


def prefilled_behind(arm: Placing, order: Sequence[str], shown: Sequence[Span]) -> list[Span]:
    """``shown``, the spans of the first units of ``order``, and one forward for each of the others."""
    spans, places = list(shown), arm.desk.places(order)
    for name, positions in list(zip(order, places, strict=True))[len(spans) :]:
        held = arm.prefilled(name, positions, spans)
        spans.append(Span(held.kv, None, (0,) * positions.shape[0]))
    return spans
