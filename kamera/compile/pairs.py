"""Windows of two to four chunks, whose patches are the terms of composed ones (`kamera.ops.compose`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from kamera.compile.plan import PlannedWindow
from kamera.compile.settings import Settings


def pair_windows(lines: Sequence[PlannedWindow], settings: Settings) -> tuple[PlannedWindow, ...]:
    """The windows that form the terms of every line that asks for pairs; they have no lines of their own.

    A line of n chunks has n(n − 1) singles and n(n − 1)(n − 2) ordered pairs, one forward each: the chunks
    of (i, j, k) are the single of j behind i and the pair of k behind i and j. With triples, windows of four
    form those as well: n(n − 1)(n − 2)(n − 3) more.
    """
    windows, most = [], 4 if settings.triples else 3
    for line in lines:
        if settings.pairs_of(line):
            chunks = tuple(dict.fromkeys(line.chunks))
            for some in itertools.permutations(chunks, min(most, len(chunks))) if len(chunks) > 1 else ():
                windows.append(replace(line, chunks=some, orbit=False, pairs=False))
    return tuple(windows)


def saved_by_a_reorder(lines: Sequence[PlannedWindow], settings: Settings) -> int:
    """Forwards that one reorder of every such line saves: that of each chunk but the leading one."""
    return sum(len(dict.fromkeys(line.chunks)) - 1 for line in lines if settings.pairs_of(line))
