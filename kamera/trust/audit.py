"""What an audit of served KV found, and how far off each guarantee may be (`kamera.window.audit`)."""

from __future__ import annotations

from dataclasses import dataclass

from kamera.trust.guarantee import Guarantee

LOSSY = 0.25
"""Bound for canonicals that are kept in codes: what 4 bits lose stays below it."""

FAR = 2.0
"""Bound of a sampled chunk's KV: a wrong completion is off by ten times its size and more."""

CLOSER = 0.1
"""A patch restores at least its stated share of the deficit's energy, less this share."""


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
    return 1.0 if guarantee in ("sampled", "orbit") else None
