"""Guarantees of a slot's KV: their names, and their comparison."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

Guarantee = Literal["exact", "patched", "sampled", "orbit", "survivor", "near", "blind"]
"""What a slot's KV is worth (docs/guarantees.md)."""

GUARANTEES: tuple[Guarantee, ...] = get_args(Guarantee)
"""All guarantees, from the strongest to the weakest."""


def at_least(guarantee: Guarantee, minimum: Guarantee) -> bool:
    """True when ``guarantee`` is ``minimum`` or stronger."""
    return GUARANTEES.index(guarantee) <= GUARANTEES.index(minimum)


def weakest(guarantees: Iterable[Guarantee]) -> Guarantee:
    """The weakest of them; "exact" for none."""
    return max(guarantees, key=GUARANTEES.index, default="exact")


def prefilled_behind(antecedents: Guarantee) -> Guarantee:
    """The guarantee of a prefill whose weakest attended KV has the guarantee ``antecedents``.

    Only a prefill behind exact KV equals a re-prefill of the window. Behind KV from patched to survivor it is
    a conditioned forward behind these antecedents: as good as a full-rank patch. Behind near or blind KV
    it is no better than they are.
    """
    if antecedents == "exact":
        return "exact"
    return "patched" if at_least(antecedents, "survivor") else antecedents


def outranks(formed: str | None, other: str | None) -> bool:
    """True if KV formed behind ``formed`` stays when KV formed behind ``other`` comes; names as stored."""
    return GUARANTEES.index(guarantee_named(formed)) < GUARANTEES.index(guarantee_named(other))


def guarantee_named(name: str | None) -> Guarantee:
    """A stored name as a guarantee; a name unknown to this version counts as the weakest."""
    return name if name in GUARANTEES else "blind"
