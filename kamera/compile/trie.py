"""A plan as a trie: a node is a chunk behind its antecedents, and has one patch.

A node is named by its path: the ids of its antecedents and its own. Sorted paths are a depth-first walk, so
the trie is a mapping: each window keeps its common prefix with the one before, and no order keeps more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Path = tuple[str, ...]
"""Chunk ids of a window, in order."""


def prefixes(path: Path) -> list[Path]:
    """The nodes of a window: its first chunk, its first two, …"""
    return [path[:n] for n in range(1, len(path) + 1)]


def leaves(windows: Iterable[Sequence[str]]) -> list[Path]:
    """The windows that are not a prefix of another, in the order of the walk."""
    paths = sorted({tuple(window) for window in windows if window})
    return [p for p, q in zip(paths, [*paths[1:], ()], strict=False) if q[: len(p)] != p]
