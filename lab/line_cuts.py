"""Cuts of long text at line ends whose line's digest says so: what sessions had before the Gear hash.

`python -m lab.cuts lines` holds both against each other. A tokenizer that joins line ends to the indent
behind them leaves no token that ends a line, and a text of one line has none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from kamera.content import LONGEST, SHORTEST

ONE_IN = 4
"""A line end is a border if the digest of its line is divisible by this."""


def line_borders(ids: Sequence[int], start: int, stop: int, line_ends: Collection[int]) -> list[int]:
    """Borders inside the text ``start:stop``, none of them at its ends; ``line_ends`` are token ids."""
    cuts: list[int] = []
    last = line = start
    for i in range(start, stop):
        if ids[i] in line_ends:
            if i + 1 - last >= SHORTEST and _chosen(ids[line : i + 1]):
                cuts.append(i + 1)
                last = i + 1
            line = i + 1
        if i + 1 - last >= LONGEST:
            cuts.append(i + 1)
            last = i + 1
    return [cut for cut in cuts if start < cut < stop]


def _chosen(line: Sequence[int]) -> bool:
    data = b"".join(i.to_bytes(4, "little") for i in line)
    return hashlib.blake2b(data, digest_size=4).digest()[0] % ONE_IN == 0
