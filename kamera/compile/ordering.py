"""In which order windows are run: as a walk over a trie, so that common antecedents are prefilled once.

The trie's nodes are chunks behind their antecedents. Sorted by chunk ids, windows stand in the order of
a depth-first walk, so the trie itself is never built: what a window has in common with the one before
it is all that can be kept, and no order keeps more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Path = tuple[str, ...]
"""Chunk ids of a window, in order."""


@dataclass(frozen=True)
class Walk:
    """Windows in trie order, whatever order they were given in.

    ``paths``: those that are no prefix of another; the others are done on the way. ``nodes[i][d]``
    numbers the node of chunk ``d`` of path ``i``: equal numbers are equal chunks behind equal
    antecedents. Path ``i`` has its first ``shared[i]`` nodes in common with the path before it and is
    the first to come by the rest, which are its own.
    """

    paths: tuple[Path, ...]
    nodes: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...]

    def places(self, window: Sequence[str]) -> tuple[int, ...]:
        """The node of each chunk of a window that the walk was made of."""
        path = tuple(window)
        if not path:  # its first chunk cannot be had, and there may be no path at all
            return ()
        first = bisect_left(self.paths, path)  # nothing sorts between a prefix and what it begins
        return self.nodes[first][: len(path)]


def walk(windows: Iterable[Sequence[str]]) -> Walk:
    """The walk over all ``windows``."""
    ordered = sorted({tuple(window) for window in windows if window})
    following = [*ordered[1:], ()][: len(ordered)]
    paths = tuple(p for p, q in zip(ordered, following, strict=True) if q[: len(p)] != p)
    nodes: list[tuple[int, ...]] = []
    shared: list[int] = []
    count = 0
    for before, path in zip([(), *paths], paths, strict=False):
        same = common(before, path)
        new = range(count, count + len(path) - same)
        count = new.stop
        nodes.append((*(nodes[-1][:same] if nodes else ()), *new))
        shared.append(same)
    return Walk(paths, tuple(nodes), tuple(shared))


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many leading chunks two windows have in common."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    return same


def shards(paths: Walk, tokens: Mapping[str, int], limit: int) -> list[range]:
    """Cut a walk into runs of consecutive paths of at most ``limit`` tokens, or one path, each.

    ``tokens`` are those of each chunk; a run costs the tokens of its distinct nodes, as whoever does it
    starts from nothing. A run that has to end does so where, in its second half, the least is shared.
    """

    def cost(i: int, held: int) -> int:
        return sum(tokens[chunk] for chunk in paths.paths[i][held:])

    runs: list[range] = []
    start = 0
    while start < len(paths.paths):
        total, stop = cost(start, 0), start + 1
        cut, least = stop, 0
        while stop < len(paths.paths):
            shared = paths.shared[stop]
            doubled = sum(tokens[chunk] for chunk in paths.paths[stop][:shared])
            if stop == start + 1 or doubled <= least or total * 2 < limit:
                cut, least = stop, doubled
            own = cost(stop, shared)
            if total + own > limit:
                break
            total, stop = total + own, stop + 1
        else:
            cut = stop
        runs.append(range(start, cut))
        start = cut
    return runs
