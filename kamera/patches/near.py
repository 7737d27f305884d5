"""The reuse envelope: the stored patch of *other* antecedents nearest to the present ones (appendix D)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kamera.store import ChunkStore, Context, ObjectInfo

Alike = Callable[[str, str], float]
"""Likeness of two chunks as antecedents: 0.0 none, 1.0 the same."""

ALIKE_ABOVE = 0.98
"""Cosine of two embeddings above which pictures count as partly equal, in proportion up to 1.0."""


class Near(NamedTuple):
    """A stored patch of other antecedents, and their divergence from the present ones."""

    divergence: float
    patch: ObjectInfo


def divergence(these: Sequence[str], those: Sequence[str], alike: Alike | None = None) -> float:
    """Share of chunks in which two antecedent sets differ: 0.0 the same set, 1.0 none in common.

    A multiset Jaccard distance; order does not count. With ``alike`` the chunks that only one of the two sets
    has are paired, the most alike first, and a pair counts as that much of one chunk in common. The paper's
    own measure (cosine of features) separates safe from unsafe reuse only softly, and so does this one: a
    hint, never a proof.
    """
    a, b = Counter(these), Counter(those)
    common = float((a & b).total())
    if alike is not None:
        common += _pair(list((a - b).elements()), list((b - a).elements()), alike)
    union = len(these) + len(those) - common
    return 0.0 if union == 0 else 1.0 - common / union


def disorder(these: Sequence[str], those: Sequence[str]) -> float:
    """Share of the pairs of chunks common to both that are in another order: 0.0 none, 1.0 all."""
    places = {chunk: i for i, chunk in enumerate(those)}
    shared = [places[chunk] for chunk in dict.fromkeys(these) if chunk in places]
    pairs = [(x, y) for i, x in enumerate(shared) for y in shared[i + 1 :]]
    return sum(x > y for x, y in pairs) / len(pairs) if pairs else 0.0


def nearest(
    patches: Iterable[ObjectInfo], antecedents: Sequence[str], limit: float, alike: Alike | None = None
) -> list[Near]:
    """Stored patches whose antecedents diverge from these by at most ``limit``, nearest first.

    For the ranking, not for the limit, a fully reversed order halves the share that the sets have in common
    (an orbit patch has no order). Among equally near patches the latest comes first.
    """

    def rank(near: Near) -> tuple[float, float, float]:
        patch = near.patch
        order = 0.0 if patch.kind == "orbit" else disorder(patch.antecedents, antecedents)
        return 1.0 - (1.0 - near.divergence) * (1.0 - order / 2), near.divergence, -patch.created

    found = (Near(divergence(p.antecedents, antecedents, alike), p) for p in patches)
    return sorted((near for near in found if near.divergence <= limit), key=rank)


def likeness(store: ChunkStore, context: Context) -> Alike:
    """Likeness of stored pictures by their embeddings; 0.0 for a chunk without one."""
    held: dict[str, np.ndarray | None] = {}

    def embedding(chunk: str) -> np.ndarray | None:
        if chunk not in held:
            held[chunk] = store.embedding(context, chunk)
        return held[chunk]

    def alike(one: str, other: str) -> float:
        a, b = embedding(one), embedding(other)
        if a is None or b is None or a.shape != b.shape:
            return 0.0
        return min(1.0, max(0.0, (float(a @ b) - ALIKE_ABOVE) / (1.0 - ALIKE_ABOVE)))

    return alike


def _pair(these: list[str], those: list[str], alike: Alike) -> float:
    """Likeness summed over disjoint pairs, the most alike first."""
    scores = sorted(
        ((alike(x, y), i, j) for i, x in enumerate(these) for j, y in enumerate(those)), reverse=True
    )
    total, left, right = 0.0, set(range(len(these))), set(range(len(those)))
    for score, i, j in scores:
        if i in left and j in right:
            left.remove(i)
            right.remove(j)
            total += score
    return total
