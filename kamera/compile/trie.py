"""A plan as a trie: a node is a chunk behind its antecedents, and has one patch.

A node is named by its path: the ids of its antecedents and its own. Sorted paths are a depth-first walk, so
the trie is a mapping: each window keeps its common prefix with the one before, and no order keeps more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

Path = tuple[str, ...]
"""Chunk ids of a window, in order."""


def prefixes(path: Path) -> list[Path]:
    """The nodes of a window: its first chunk, its first two, …"""
    return [path[:n] for n in range(1, len(path) + 1)]


def leaves(windows: Iterable[Sequence[str]]) -> list[Path]:
    """The windows that are not a prefix of another, in the order of the walk."""
    ordered = sorted({tuple(window) for window in windows if window})
    return [p for p, q in zip(ordered, [*ordered[1:], ()], strict=False) if q[: len(p)] != p]


def shards(paths: Sequence[Path], tokens: Mapping[str, int], limit: int) -> list[list[Path]]:
    """Cut leaves of a walk into runs of neighbours, each of at most ``limit`` tokens or one path.

    ``tokens`` are those of each chunk; a run costs the tokens of its nodes, because its worker starts without
    KV. Runs are cut where the fewest chunks are shared.
    """

    def fits(run: Sequence[Path]) -> bool:
        return sum(tokens[node[-1]] for node in {p for path in run for p in prefixes(path)}) <= limit

    def cut(run: list[Path], depth: int) -> list[list[Path]]:
        if len(run) < 2 or fits(run):
            return [run]
        runs: list[list[Path]] = []
        for _, branch in groupby(run, key=itemgetter(depth)):
            for part in cut(list(branch), depth + 1):
                if runs and fits([*runs[-1], *part]):
                    runs[-1] += part
                else:
                    runs.append(part)
        return runs

    return cut(list(paths), 0) if paths else []
