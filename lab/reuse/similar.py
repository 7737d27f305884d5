"""Near-duplicate segments: MinHash over token shingles of canonical text. Proposals, never hits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lab.reuse.words import Tokenise, canonical, word_ids

_PERMUTATIONS = 128
_SEED = 20_240_515  # of the permutations: only signatures of one seed compare


@dataclass(frozen=True)
class Proposal:
    """A stored segment similar to the one in the query. Its KV is *not* that of the query.

    ``key`` names the segment, ``similarity`` estimates the Jaccard index of the two segments' shingles,
    ``left`` that of the text before them (1.0 if neither has any). No KV is reused by similarity.
    """

    key: str
    similarity: float
    left: float


class SimilarIndex:
    """Similarity index of texts, in memory. Needs the rensa package.

    ``shingle`` consecutive tokens of the canonical text are one feature. ``threshold`` is the least
    similarity that is proposed; the bands find a pair at the threshold about half of the time and more
    similar ones almost surely. The ``left_tokens`` before a segment make its left-context signature.
    """

    def __init__(
        self,
        tokenise: Tokenise = word_ids,
        *,
        threshold: float = 0.6,
        shingle: int = 8,
        left_tokens: int = 128,
    ) -> None:
        """`ValueError` for a threshold outside 0 to 1, or sizes below 1; `ImportError` without rensa."""
        if not 0.0 < threshold <= 1.0:
            raise ValueError(f"threshold {threshold} must be above 0 and at most 1")
        if shingle < 1 or left_tokens < 1:
            raise ValueError(f"shingle {shingle} and left_tokens {left_tokens} must be at least 1")
        try:
            import rensa
        except ImportError as error:
            raise ImportError("similar segments need the rensa package: pip install rensa") from error
        self._rensa = rensa
        self._tokenise = tokenise
        self._threshold = threshold
        self._shingle = shingle
        self._left_tokens = left_tokens
        self._bands = rensa.RMinHashLSH(
            threshold=threshold, num_perm=_PERMUTATIONS, num_bands=_bands(threshold)
        )
        self._entries: list[tuple[str, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: str, text: str, left: str = "") -> None:
        """Add the segment ``key`` with ``text``, which followed ``left``."""
        signature = self._signature(self._features(text))
        self._bands.insert(len(self._entries), signature)
        self._entries.append((key, signature, self._left(left)))

    def propose(self, text: str, left: str = "", *, limit: int = 8) -> tuple[Proposal, ...]:
        """At most ``limit`` segments similar to ``text``; ties are ordered by the similarity of ``left``."""
        signature, context = self._signature(self._features(text)), self._left(left)
        proposals = []
        for number in self._bands.query(signature):
            key, held, held_left = self._entries[number]
            similarity = float(held.jaccard(signature))
            if similarity >= self._threshold:
                proposals.append(Proposal(key, similarity, _alike(held_left, context)))
        proposals.sort(key=lambda p: (-p.similarity, -p.left, p.key))
        return tuple(proposals[:limit])

    def _left(self, text: str) -> Any:
        features = self._features(text, last=self._left_tokens)
        return self._signature(features) if features else None

    def _features(self, text: str, last: int | None = None) -> list[bytes]:
        ids = np.asarray(self._tokenise(canonical(text)), "<u4")
        if last is not None:
            ids = ids[-last:]
        raw = ids.tobytes()
        size = 4 * self._shingle
        if len(raw) <= size:
            return [raw] if raw else []
        return [raw[start : start + size] for start in range(0, len(raw) - size + 1, 4)]

    def _signature(self, features: list[bytes]) -> Any:
        made = self._rensa.RMinHash(num_perm=_PERMUTATIONS, seed=_SEED)
        made.update(features)
        return made


def _alike(left: Any, right: Any) -> float:
    if left is None or right is None:
        return float(left is right)
    return float(left.jaccard(right))


def _bands(threshold: float) -> int:
    """Number of bands whose threshold ``(1/b)**(b/permutations)`` is nearest below ``threshold``."""
    divisors = [b for b in range(1, _PERMUTATIONS + 1) if _PERMUTATIONS % b == 0]
    return min(b for b in divisors if (1 / b) ** (b / _PERMUTATIONS) <= threshold or b == _PERMUTATIONS)
