"""A backbone's answers to its probe: they travel with every object it computed; look-ups compare them.

A fingerprint binds all of a model that can be digested. A difference that cannot be (a kernel that computes
wrongly) shows in the model's answers. Answers are compared within a tolerance, so they are no part of a key:
they stand in the context of a look-up and in the header of an object, wherever the object is kept or copied.
They guard against accidents of a machine, not against an attacker who may write objects.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping, Sequence

from kamera.errors import ComputationChanged

Answers = Mapping[str, Sequence[float]]
"""A few numbers, by the name of the question."""


class Unasked:
    """The text of answers that a model has perhaps not given yet: ``ask`` is called when it is first read.

    A store reads it before an object is handed out or kept, so nothing is served or stored without it.
    """

    def __init__(self, ask: Callable[[], str]) -> None:
        self._ask: Callable[[], str] | None = ask
        self._text = ""

    def __str__(self) -> str:
        """The text. Raises the errors of ``ask``; then it is asked for again."""
        ask = self._ask
        if ask is not None:
            self._text = ask()
            self._ask = None  # a stored object must not keep the model
        return self._text


def probe_text(answers: Answers, tolerance: float) -> str:
    """Answers as text, with the distance up to which others count as equal; "" for none.

    Example: ``5e-03 text=AACAPw==``, each answer as little-endian float32 in base64.
    """
    if not answers:
        return ""
    parts = (f"{name}={_pack(values)}" for name, values in sorted(answers.items()))
    return " ".join((f"{tolerance:.0e}", *parts))


def check_probe(probe: str) -> None:
    """Raise `ValueError` for a text that `probe_text` does not make."""
    _parse(probe)


def compare(mine: str, theirs: str, what: str) -> None:
    """Raise `ComputationChanged` unless ``theirs``, in the header of ``what``, equal ``mine`` in tolerance.

    The tolerance is that of ``mine``; without answers there is nothing to compare.
    """
    if not mine or mine == theirs:
        return
    tolerance, my_answers = _parse(mine)
    their_answers = _parse(theirs)[1] if theirs else {}
    if not their_answers.keys() & my_answers.keys():
        raise ComputationChanged(
            f"{what} does not say what the model that computed it answers to the probe: delete it, or use "
            "another store"
        )
    for name in sorted(my_answers.keys() & their_answers.keys()):
        gap = answers_apart(my_answers[name], their_answers[name])
        if not gap <= tolerance:
            raise ComputationChanged(
                f"{what} was computed by a model of this fingerprint that answers the {name} probe otherwise "
                f"than this one (relative distance {gap:.1e}, tolerance {tolerance:.0e}): nothing that can "
                "be digested differs; undo what was patched, or use another store"
            )


def answers_apart(known: Sequence[float], now: Sequence[float]) -> float:
    """Relative L2; infinite for answers of another length, nan for answers that are no numbers."""
    if len(known) != len(now):
        return math.inf
    length = math.sqrt(sum(x * x for x in known))
    return math.dist(known, now) / max(length, 1e-30)


def _pack(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _parse(probe: str) -> tuple[float, dict[str, tuple[float, ...]]]:
    tolerance, *parts = probe.split(" ")
    answers = {}
    for one in parts:
        name, _, packed = one.partition("=")
        data = base64.b64decode(packed, validate=True)
        if not data or len(data) % 4:
            raise ValueError(f"{len(data)} bytes are no answers to the {name!r} probe")
        answers[name] = struct.unpack(f"<{len(data) // 4}f", data)
    if not answers:
        raise ValueError(f"a probe without answers: {probe!r}")
    return float(tolerance), answers
