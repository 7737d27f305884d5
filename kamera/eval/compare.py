"""Arms against the reference and against blind reuse, item by item: the numbers of every table here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kamera.certify import bootstrap
from kamera.trust import Estimate


@dataclass(frozen=True)
class Judgement:
    """One answer of an arm: ``right`` 0.0 to 1.0 (None without a label), whether it decides as the reference
    does (``agrees``, 1.0 or 0.0), and KL(arm ‖ reference) in nats of its first token; None without a
    reference.
    """

    item: str
    right: float | None
    agrees: float | None
    kl: float | None


@dataclass(frozen=True)
class Comparison:
    """Means over items with 95 % bootstrap intervals, nan where nothing can be said.

    ``flip_recover`` is the agreement over the answers that blind reuse decides otherwise than the reference.
    """

    accuracy: Estimate
    agreement: Estimate
    flip_recover: Estimate
    kl: Estimate


def compare(arm: Sequence[Judgement], blind: Sequence[Judgement] = ()) -> Comparison:
    """An arm's answers; ``blind`` are those of blind reuse to the same questions, if they were asked."""
    flipped = [one for one, base in zip(arm, blind, strict=bool(blind)) if base.agrees == 0.0]
    return Comparison(
        _interval([(one.item, one.right) for one in arm]),
        _interval([(one.item, one.agrees) for one in arm]),
        _interval([(one.item, one.agrees) for one in flipped]),
        _interval([(one.item, one.kl) for one in arm]),
    )


def _interval(values: Sequence[tuple[str, float | None]]) -> Estimate:
    """Over items: the answers to one behind several traces are not independent."""
    by_item: dict[str, list[float]] = {}
    for item, value in values:
        if value is not None:
            by_item.setdefault(item, []).append(value)
    return bootstrap([sum(some) / len(some) for some in by_item.values()])
