"""Guarantees after a change in front: of a chunk that stays, and of the KV that the next one attends to."""

from __future__ import annotations

from kamera.patches import Facts, Guarantee, weakest
from kamera.window.seats import Seat, Seats

GLUE = 64
"""Tokens below which a conversation's text is not kept by itself: the tags of a template, a question.

It runs in the forward of its neighbours, which it makes no longer. Its canonical, a patch and their proofs
would each take forwards of their own, and files and look-ups that cost more than they ever save.
"""

SHORTEST_KEPT = 16
"""Fewest tokens of glue that is sampled, and kept for that where it comes again behind others."""

_WHEN_AN_ANTECEDENT_LEAVES: dict[Guarantee, Guarantee] = {
    "exact": "survivor",
    "patched": "survivor",
    "survivor": "survivor",
    "sampled": "survivor",
    "orbit": "near",
    "near": "near",
    "blind": "blind",
}


def is_glue(facts: Facts) -> bool:
    """True for a text of fewer than `GLUE` tokens."""
    return facts.length < GLUE and not (facts.encoded.tensors or facts.position_inputs)


def survivor_of(seat: Seat) -> Seat:
    """A chunk that stays as it is while an antecedent leaves."""
    return seat.labelled(_WHEN_AN_ANTECEDENT_LEAVES[seat.guarantee])


def staying_behind(seat: Seat, before: Seats) -> Seat:
    """A chunk that stays while its antecedents change: a survivor, or less if new ones precede it."""
    if seat.source.antecedents == before.lineage:
        return seat
    survivor = survivor_of(seat)
    knew = set(seat.source.chunk_ids)
    if all(chunk_id in knew for chunk_id in before.chunk_ids):
        return survivor
    return survivor.labelled(weakest((survivor.guarantee, "near")))


def footing(before: Seats) -> Guarantee:
    """The weakest guarantee among the KV that a chunk here attends to.

    Across a gap, left by skipped positions in front, even exact KV is a survivor's: no re-prefill of the
    sequence attends across it.
    """
    found = weakest(before.worths)
    return weakest((found, "survivor")) if any(before.shift) else found
