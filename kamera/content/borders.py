"""Borders of segments in a rendered conversation: turns, media, and content-defined lines of long text."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

LONGEST = 512
"""Most tokens of text in one segment."""

SHORTEST = 32
"""Fewest tokens of text in a segment that ends at a line end."""

ONE_IN = 4
"""A line end is a border if the digest of its line is divisible by this."""


def turn_borders(ids: Sequence[int], opener: int | None, start: int, stop: int) -> list[int]:
    """Starts of turns: positions of the ``opener`` token in ``start:stop``."""
    return [] if opener is None else [i for i in range(start, stop) if ids[i] == opener]


def line_borders(
    ids: Sequence[int], start: int, stop: int, line_ends: Collection[int], *, longest: int = LONGEST
) -> list[int]:
    """Borders inside the text ``start:stop``, none of them at its ends.

    The digest of a line decides if its end is a border (content-defined chunking), so an edit moves only
    the borders next to it. Text without such a line is cut after ``longest`` tokens.
    """
    cuts: list[int] = []
    last = line = start
    for i in range(start, stop):
        if ids[i] in line_ends:
            if i + 1 - last >= SHORTEST and _chosen(ids[line : i + 1]):
                cuts.append(i + 1)
                last = i + 1
            line = i + 1
        if i + 1 - last >= longest:
            cuts.append(i + 1)
            last = i + 1
    return [cut for cut in cuts if start < cut < stop]


def _chosen(line: Sequence[int]) -> bool:
    data = b"".join(i.to_bytes(4, "little") for i in line)
    return hashlib.blake2b(data, digest_size=4).digest()[0] % ONE_IN == 0
