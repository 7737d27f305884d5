"""Order of windows: a walk over a trie, so that common antecedents are prefilled once.

The trie's nodes are chunks with their antecedents. Sorting windows by chunk ids gives a depth-first walk, so
the trie itself is never built: each window keeps its common prefix with the one before, and no order keeps
more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kamera.content import common_prefix

Path = tuple[str, ...]
"""Chunk ids of a window, in order."""


@dataclass(frozen=True)
class Walk:
    """Windows in trie order.

    ``paths``: the windows that are not a prefix of another. ``nodes[i][d]`` numbers the node of chunk ``d``
    of path ``i``: equal numbers are equal chunks behind equal antecedents. Path ``i`` shares its first
    ``shared[i]`` nodes with the path before it; the others are new.
    """

    paths: tuple[Path, ...]
    nodes: tuple[tuple[int, ...], ...]
    shared: tuple[int, ...]

    def places(self, window: Sequence[str]) -> tuple[int, ...]:
        """The node of each chunk of a window of the walk."""
        path = tuple(window)
        if not path:  # its first chunk is unavailable, and the walk may be empty
            return ()
        first = bisect_left(self.paths, path)  # a prefix sorts directly before its extensions
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
        same = common_prefix(before, path)
        new = range(count, count + len(path) - same)
        count = new.stop
        nodes.append((*(nodes[-1][:same] if nodes else ()), *new))
        shared.append(same)
    return Walk(paths, tuple(nodes), tuple(shared))


def shards(paths: Walk, tokens: Mapping[str, int], limit: int) -> list[range]:
    """Cut a walk into runs of consecutive paths, each of at most ``limit`` tokens or one path.

    ``tokens`` are those of each chunk; a run costs the tokens of its distinct nodes, because its worker
    starts without KV. A run ends at the smallest common prefix in its second half.
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
