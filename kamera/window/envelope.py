"""The reuse envelope: which stored patch of *other* antecedents is nearest to these (appendix D)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kamera.store import ObjectInfo


def divergence(these: Sequence[str], those: Sequence[str]) -> float:
    """Share of chunks in which two antecedent sets differ: 0.0 the same set, 1.0 none in common.

    A multiset Jaccard distance; order does not count. The paper's own measure (cosine of features)
    separates safe from unsafe reuse only softly, and so does this one: a hint, never a proof.
    """
    a, b = Counter(these), Counter(those)
    union = sum((a | b).values())
    return 0.0 if union == 0 else 1.0 - sum((a & b).values()) / union


def nearest(patches: Iterable[ObjectInfo], antecedents: Sequence[str], limit: float) -> list[ObjectInfo]:
    """Stored patches whose antecedents diverge from these by at most ``limit``, nearest first."""
    ranked = [(divergence(p.antecedents, antecedents), p) for p in patches]
    within = [pair for pair in ranked if pair[0] <= limit]
    return [p for _, p in sorted(within, key=lambda pair: (pair[0], -pair[1].created))]
