"""What two sequences begin with."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(one: Sequence[int | str], other: Sequence[int | str]) -> int:
    """Number of equal leading entries: token ids, or names of chunks."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
