"""A trie of segments: every added prompt is a path from the root, common prefixes are shared."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from kamera.reuse.prompt import Prompt
from kamera.reuse.table import Content, SegmentTable

ROOT = 0

_HEAD = 16  # tokens that distinguish a node's children


class Paths:
    """A trie whose node n is one segment after all those above it. Nodes count from 1."""

    def __init__(self, table: SegmentTable) -> None:
        self._table = table
        self._parents = [ROOT]
        self._segments = [-1]
        self._steps: dict[tuple[int, int], int] = {}
        self._heads: dict[tuple[int, bytes, str], list[int]] = {}
        self._short: dict[int, set[int]] = {}  # lengths of children shorter than a head

    def __len__(self) -> int:
        return len(self._parents)

    def child(self, node: int, segment: int) -> int | None:
        """The child of ``node`` for ``segment``; None if there is none."""
        return self._steps.get((node, segment))

    def step(self, node: int, segment: int) -> int:
        """As `child`, created if there is none. Raises `IndexError` for an unknown node."""
        known = self._steps.get((node, segment))
        if known is not None:
            return known
        self._parents[node]  # an unknown node raises
        new = self._steps[node, segment] = len(self._parents)
        self._parents.append(node)
        self._segments.append(segment)
        content = self._table[segment]
        self._heads.setdefault((node, content.ids[: 4 * _HEAD], content.media), []).append(new)
        if content.tokens < _HEAD:
            self._short.setdefault(node, set()).add(content.tokens)
        return new

    def longest_prefix(self, prompt: Prompt) -> int:
        """Length of the longest prefix of ``prompt`` that an earlier prompt begins with, tokens compared.

        A lower bound, at most 15 too small: a difference within a segment's first 16 tokens counts from the
        segment's start. A picture counts whole or not at all.
        """
        media = {m.start: m for m in prompt.media}
        borders = [*media, len(prompt)]
        best = 0
        open_ends = [(ROOT, 0)]
        while open_ends:
            node, at = open_ends.pop()
            best = max(best, at)
            if at == len(prompt):
                break
            if at in media:
                one = media[at]
                content = Content(prompt.slice(at, one.stop), one.digest)
                for child in self._heads.get((node, content.ids[: 4 * _HEAD], content.media), ()):
                    if self._table[self._segments[child]] == content:
                        open_ends.append((child, one.stop))
                continue
            border = borders[bisect_left(borders, at)]
            for child in self._children(node, prompt, at):
                segment = self._table[self._segments[child]]
                if segment.tokens <= border - at and prompt.raw.startswith(segment.ids, 4 * at):
                    open_ends.append((child, at + segment.tokens))
                else:
                    best = max(best, at + _common(segment.ids, prompt, at, border))
        return best

    def _children(self, node: int, prompt: Prompt, at: int) -> list[int]:
        found = list(self._heads.get((node, prompt.slice(at, at + _HEAD), ""), ()))
        for length in self._short.get(node, ()):
            found += self._heads.get((node, prompt.slice(at, at + length), ""), ())
        return list(dict.fromkeys(found))


def _common(ids: bytes, prompt: Prompt, at: int, border: int) -> int:
    there = np.frombuffer(ids, "<u4")[: border - at]
    differ = there != prompt.ids[at : at + len(there)]
    return int(differ.argmax()) if differ.any() else len(there)
