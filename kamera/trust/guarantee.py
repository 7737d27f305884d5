"""Guarantees of a slot's KV: their names, their comparison, and how far off an audit may find each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Guarantee = Literal["exact", "patched", "orbit", "survivor", "near", "blind"]
"""What a slot's KV is worth (docs/how-it-works.md)."""

GUARANTEES: tuple[Guarantee, ...] = get_args(Guarantee)
"""All guarantees, from the strongest to the weakest."""

LOSSY = 0.25
"""Bound for canonicals that are kept in codes: what 4 bits lose stays below it."""

CLOSER = 0.1
"""A patch restores at least its stated share of the deficit's energy, less this share."""


def at_least(guarantee: Guarantee, minimum: Guarantee) -> bool:
    """True when ``guarantee`` is ``minimum`` or stronger."""
    return GUARANTEES.index(guarantee) <= GUARANTEES.index(minimum)


def weakest(guarantees: Iterable[Guarantee]) -> Guarantee:
    """The weakest of them; "exact" for none."""
    return max(guarantees, key=GUARANTEES.index, default="exact")


def prefilled_behind(antecedents: Guarantee) -> Guarantee:
    """The guarantee of a prefill whose weakest attended KV has the guarantee ``antecedents``.

    Only a prefill behind exact KV equals a re-prefill of the window. Behind KV from patched to near it is
    a conditioned forward behind these antecedents: as good as a full-rank patch. Behind blind KV it is no
    better than that.
    """
    if antecedents == "exact":
        return "exact"
    return "patched" if at_least(antecedents, "near") else antecedents


def outranks(formed: str | None, other: str | None) -> bool:
    """True if KV formed behind ``formed`` stays when KV formed behind ``other`` comes; names as stored."""
    return GUARANTEES.index(guarantee_named(formed)) < GUARANTEES.index(guarantee_named(other))


def guarantee_named(name: str | None) -> Guarantee:
    """A stored name as a guarantee; a name unknown to this version counts as the weakest."""
    return name if name in GUARANTEES else "blind"


@dataclass(frozen=True)
class AuditFinding:
    """What an audit measured: the error of ``part`` of a slot, relative, against its ``bound``.

    ``part`` "KV": served against prefilled again, the largest relative L2 error of a layer and channel.
    "canonical" and "system prompt": the same of stored KV. "patch": the share of the deficit's energy that
    the served KV lacks.
    """

    chunk_id: str
    guarantee: Guarantee
    part: str
    error: float
    bound: float

    @property
    def holds(self) -> bool:
        """True if the error is within the bound; a NaN is not."""
        return self.error <= self.bound

    def __str__(self) -> str:
        return (
            f"audit of chunk {self.chunk_id[:12]} ({self.guarantee}): its {self.part} is off by "
            f"{self.error:.1e}, the bound is {self.bound:.1e}"
        )


def lacking_bound(guarantee: Guarantee, kept: float | None) -> float | None:
    """Largest share of the deficit's energy that a slot of this guarantee may lack; None: any.

    ``kept`` is the share that its stored patch says it keeps (None: not said, or not all of it is served).
    """
    if guarantee == "patched":
        return 1.0 if kept is None else min(1.0, 1.0 - kept + CLOSER)
    return 1.0 if guarantee == "orbit" else None
