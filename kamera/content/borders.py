"""Where two sequences part, and where segments begin: at turns, and at content-defined cuts of long text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LONGEST = 512
"""Most tokens of text in one segment."""

SHORTEST = 32
"""Fewest tokens of text in a segment that its content ends: the window of the hash."""

EXPONENT = 7
"""A text may end where so many bits of the hash are zero: after one in 128 tokens."""


def turn_borders(ids: Sequence[int], opener: int | None, start: int, stop: int) -> list[int]:
    """Starts of turns: positions of the ``opener`` token in ``start:stop``."""
    return [] if opener is None else [i for i in range(start, stop) if ids[i] == opener]


def text_borders(
    places: Sequence[int], start: int, stop: int, *, shortest: int = SHORTEST, longest: int = LONGEST
) -> list[int]:
    """Borders inside the text ``start:stop``, none of them at its ends.

    ``places`` are where content may end a segment (`candidates`), ascending. A segment ends at the first one
    behind its ``shortest`` tokens, or after its ``longest``: on its own tokens alone, so that an edit moves
    only the borders next to it.
    """
    cuts: list[int] = []
    at = bisect_left(places, start)
    while stop - start > shortest:
        at = bisect_left(places, start + shortest, at)
        start = min(places[at] if at < len(places) else stop, start + longest)
        if start >= stop:
            break
        cuts.append(start)
    return cuts


def common_prefix(one: Sequence[int | str], other: Sequence[int | str]) -> int:
    """Number of equal leading entries: token ids, or names of chunks."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
