"""What a chunk stands on, and what it is worth when that leaves."""

from __future__ import annotations

from kamera.patches import Guarantee, weakest
from kamera.window.seats import Seat, Seats

_WHEN_AN_ANTECEDENT_LEAVES: dict[Guarantee, Guarantee] = {
    "exact": "survivor",
    "patched": "survivor",
    "survivor": "survivor",
    "orbit": "near",
    "near": "near",
    "blind": "blind",
}


def footing(before: Seats) -> Guarantee:
    """The weakest guarantee among the KV that a chunk here attends to.

    Across a gap, left by skipped positions in front, even exact KV is a survivor's: no re-prefill of the
    sequence attends across it.
    """
    footing = weakest(before.worths)
    return weakest((footing, "survivor")) if any(before.shift) else footing


def survivor(seat: Seat) -> Seat:
    """The seat of a chunk that stays while an antecedent leaves."""
    return seat.labelled(_WHEN_AN_ANTECEDENT_LEAVES[seat.guarantee])
