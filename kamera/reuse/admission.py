"""Admission: how far the stored KV of a found segment may be trusted, and the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kamera.trust import Guarantee

Tier = Literal["exact", "patched", "sampled", "orbit", "survivor", "approximate", "none"]
"""``exact``: same tokens behind the same whole left context. ``patched``, ``orbit``: a stored
patch for this left context. ``sampled``: a few of its tokens run behind this left context. ``survivor``: kept
in place although an antecedent has left. ``approximate``: stored for another left context, admitted by guard
and probe. ``none``: not reused, prefilled."""


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


def tier_of(guarantee: str) -> Tier:
    """The tier of reused KV by the guarantee of its slot."""
    found: Tier = next((tier for tier in get_args(Tier) if tier == guarantee), "approximate")
    return found
