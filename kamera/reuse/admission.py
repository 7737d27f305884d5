"""Admission: how far the stored KV of a found segment may be trusted, and the reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from kamera.errors import CorruptChunk, StoreError, WrongKey
from kamera.trust import Guarantee
from kamera.window import KameraWindow, Plan, Slot, former_of

Tier = Literal["exact", "patched", "orbit", "near", "survivor", "blind", "none"]
"""``exact``: same tokens behind the same whole left context. ``patched``, ``orbit``: a stored patch for this
left context; ``near``: for another one. ``survivor``: kept in place although an antecedent has left.
``blind``: the stored copy alone. ``none``: not reused, prefilled."""


@dataclass(frozen=True)
class Admission:
    """A segment of a prompt: its tokens ``start`` to ``stop``, its tier, and the reason for it.

    ``guarantee`` is the one its slot shows; that of a prefilled segment tells the KV it attended to. Its
    first ``head`` tokens are not prefilled: a segment that begins so is held behind the same whole context.
    """

    start: int
    stop: int
    chunk_id: str
    tier: Tier
    guarantee: Guarantee
    reason: str
    head: int = 0

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.stop - self.start


def admissions_of(window: KameraWindow, plan: Plan, recurring: Collection[str] = ()) -> tuple[Admission, ...]:
    """The admissions of a window's segments under ``plan``, in order.

    ``recurring`` are ids of those that came before elsewhere.
    """
    sources = {seat.number: seat.source for seat in plan.before.seats}
    out: list[Admission] = []
    at = former_of(window).anchor.length
    for seat, worth in zip(plan.after.seats, plan.after.guarantees, strict=True):
        tier, source, head = _tier_of(worth), seat.source, plan.heads.get(seat.number, 0)
        if head == seat.length:
            reason = f"{worth}: the first tokens of a segment that the window holds"
        elif sources.get(seat.number) == source:
            reason = f"{worth}: held by the window"
        elif source.patch:
            reason = f"{worth}: a stored patch for {'another' if worth == 'near' else 'this'} left context"
        elif source.canonical and _is_stored(window, seat.chunk_id):
            is_blind = worth == "blind"
            reason = f"{worth}: " + (
                "its stored copy alone" if is_blind else "leads the prompt, as its stored copy does"
            )
        else:
            tier, reason = "none", _why(window, seat.chunk_id, recurring)
            reason += f"; the window holds its first {head} tokens" if head else ""
        out.append(Admission(at, at + seat.length, seat.chunk_id, tier, worth, reason, head))
        at += seat.length
    return tuple(out)


def admissions_after_run(
    admissions: Sequence[Admission], plan: Plan, slots: Sequence[Slot]
) -> tuple[Admission, ...]:
    """The admissions after ``plan`` has run, with the guarantees of the window's ``slots``."""
    out = []
    for admission, seat, slot in zip(admissions, plan.after.seats, slots, strict=True):
        if seat.source.patch and slot.rank is None:
            admission = replace(admission, tier="none", reason="the stored patch was refused")
        out.append(replace(admission, guarantee=slot.guarantee))
    return tuple(out)


def _tier_of(guarantee: str) -> Tier:
    """The tier of reused KV by the guarantee of its slot."""
    match: Tier = next((tier for tier in get_args(Tier) if tier == guarantee), "none")
    return match


def _is_stored(window: KameraWindow, chunk_id: str) -> bool:
    try:
        former = former_of(window)
        return former.store.info(former.context, chunk_id) is not None
    except (CorruptChunk, WrongKey, StoreError):
        return False  # the window refuses it, too, and says so in its report


def _why(window: KameraWindow, chunk_id: str, recurring: Collection[str]) -> str:
    if _is_stored(window, chunk_id):
        return "stored, but not for this left context"
    is_recurring = chunk_id in recurring
    return "it came before, but no copy of it by itself is stored" if is_recurring else "no copy is stored"
