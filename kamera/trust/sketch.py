"""Sketches of questions: which tokens one has, in a few bytes that do not tell them, to see if two are alike.

A sketch is a bitmap of hashed token ids. It says nothing about what a question means: two that bind different
things in the same words are alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

ALIKE = 0.5
"""Share of the tokens of either question that both have, from which on they count as alike."""

_BITS = 256
_KEPT = 64
"""Tokens that are kept of a long question, the same ones of every question that has them."""


def sketch(ids: Iterable[int]) -> str:
    """The sketch of a question's token ids, 64 hex digits. Neither order nor number counts."""
    hashed = sorted({_hash(number) for number in ids})[:_KEPT]
    return f"{sum(1 << bit for bit in {h % _BITS for h in hashed}):0{_BITS // 4}x}"


def alike(one: str, other: str) -> bool:
    """True if two questions of these sketches have most of their tokens in common."""
    a, b = int(one, 16), int(other, 16)
    return a == b or (a & b).bit_count() >= ALIKE * (a | b).bit_count()


def kinds(sketches: Sequence[str]) -> int:
    """The number of questions that are unlike every one counted before."""
    counted: list[str] = []
    for one in sketches:
        if not any(alike(one, other) for other in counted):
            counted.append(one)
    return len(counted)


def is_sketch(value: object) -> bool:
    """True if this can be a `sketch`."""
    return isinstance(value, str) and re.fullmatch(rf"[0-9a-f]{{{_BITS // 4}}}", value) is not None


def _hash(number: int) -> int:
    """A 64-bit hash of a token id (the finalizer of splitmix64)."""
    x = (number + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)
