"""The content index: finds parts of a prompt in earlier prompts, as a prefix or at any position."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kamera.reuse.cuts import cut, sub_windows, windows
from kamera.reuse.paths import ROOT, Paths
from kamera.reuse.prompt import Prompt
from kamera.reuse.rules import CutRule
from kamera.reuse.scan import WINDOW, Scan
from kamera.reuse.scope import Scope, segment_key
from kamera.reuse.table import Content, SegmentTable


class Hit(NamedTuple):
    """Tokens ``start`` to ``stop`` of a prompt equal ``segment`` of the index, token by token.

    Their antecedents may differ, and with them their KV.
    """

    start: int
    stop: int
    segment: int


@dataclass(frozen=True)
class Found:
    """Parts of a prompt seen before: its first ``prefix`` tokens, and ``hits`` that end after them.

    Hits are in the order of their starts; those of overlapping windows overlap.
    """

    prefix: int
    hits: tuple[Hit, ...]


@dataclass(frozen=True)
class Record:
    """Additions of a prompt: segments after ``node``, by their ``lengths`` in ``ids`` and media digests.

    ``windows`` are further segments by start and stop, counted from the first of ``lengths``.
    """

    node: int
    lengths: tuple[int, ...]
    media: tuple[str, ...]
    windows: tuple[tuple[int, int], ...]
    ids: bytes


class ContentIndex:
    """Segments and prompts of one scope, cut by one rule, in memory. Not thread-safe."""

    def __init__(self, scope: Scope, rule: CutRule) -> None:
        self.scope = scope
        self.rule = rule
        self._table = SegmentTable(int(scope.digest[:16], 16))
        self._paths = Paths(self._table)
        self._scan = Scan()

    def __len__(self) -> int:
        """Number of distinct segments, sub-windows and windows included."""
        return len(self._table)

    def content(self, segment: int) -> Content:
        """Ids and media of a segment by its number."""
        return self._table[segment]

    def key(self, segment: int) -> str:
        """The segment's key in a store."""
        return segment_key(self.scope, *self._table[segment])

    def find(self, prompt: Prompt) -> Found:
        """The parts of ``prompt`` that were added before. Changes nothing."""
        prefix = self._paths.longest_prefix(prompt)
        hits: list[Hit] = []
        if prefix == len(prompt):
            return Found(prefix, ())
        for start, stop, content in _pieces(prompt, self.rule):
            if stop <= prefix:
                continue
            number = self._table.find(content)
            if number is not None:
                hits.append(Hit(start, stop, number))
            elif not content.media and not self.rule.scan:
                hits += self._look_up(prompt, sub_windows(start, stop, self.rule.sub_window), prefix)
        if self.rule.windows:
            hits = sorted({*hits, *self._look_up(prompt, windows(prompt, self.rule), prefix)})
        if self.rule.scan:
            hits = sorted([*hits, *self._scanned(prompt, prefix, hits)])
        return Found(prefix, tuple(hits))

    def add(self, prompt: Prompt) -> int:
        """Add ``prompt``; returns the number of new segments."""
        known = len(self)
        self.apply(self.record_of(prompt))
        return len(self) - known

    def record_of(self, prompt: Prompt) -> Record:
        """The record that `add` would apply: all of ``prompt`` after its longest path in the trie."""
        node = ROOT
        lengths: list[int] = []
        media: list[str] = []
        begin = 0
        for start, stop, content in _pieces(prompt, self.rule):
            if not lengths:
                number = self._table.find(content)
                further = None if number is None else self._paths.child(node, number)
                if further is not None:
                    node, begin = further, stop
                    continue
            lengths.append(stop - start)
            media.append(content.media)
        extra = tuple((a - begin, b - begin) for a, b in windows(prompt, self.rule) if a >= begin)
        return Record(node, tuple(lengths), tuple(media), extra, prompt.slice(begin, len(prompt)))

    def apply(self, record: Record) -> None:
        """Add a record. Raises `ValueError`, and adds nothing, for one that does not fit the index."""
        if not 0 <= record.node < len(self._paths):
            raise ValueError(f"a record follows node {record.node} of {len(self._paths)}")
        node = record.node
        pieces: list[tuple[int, int]] = []
        start = 0
        for length, digest in zip(record.lengths, record.media, strict=True):
            stop = start + length
            number = self._table.add(Content(record.ids[4 * start : 4 * stop], digest))
            node = self._paths.step(node, number)
            if not digest:
                pieces += sub_windows(start, stop, self.rule.sub_window)
                if self.rule.scan and length == WINDOW:  # the segment is its own only piece
                    pieces.append((start, stop))
            start = stop
        self._take(record.ids, pieces)
        self._take(record.ids, record.windows)
        if self.rule.scan and pieces:
            self._scan.add(np.frombuffer(record.ids, "<u4"), np.array([a for a, _ in pieces]))

    def _look_up(self, prompt: Prompt, places: Iterable[tuple[int, int]], prefix: int) -> list[Hit]:
        hits = []
        for start, stop in places:
            if stop > prefix:
                number = self._table.find(Content(prompt.slice(start, stop)))
                if number is not None:
                    hits.append(Hit(start, stop, number))
        return hits

    def _scanned(self, prompt: Prompt, prefix: int, hits: list[Hit]) -> list[Hit]:
        """Stored windows in the gaps between prefix, hits and pictures, from left to right."""
        taken = [(0, prefix), *((h.start, h.stop) for h in hits), *((m.start, m.stop) for m in prompt.media)]
        taken = sorted([*taken, (len(prompt), len(prompt))])
        found = []
        at = 0
        places = iter(self._scan.candidates(prompt.ids).tolist())
        place = next(places, len(prompt))
        for start, stop in taken:  # the gap before each
            while place < start:
                if at <= place and place + WINDOW <= start:
                    number = self._table.find(Content(prompt.slice(place, place + WINDOW)))
                    if number is not None:
                        found.append(Hit(place, place + WINDOW, number))
                        at = place + WINDOW
                place = next(places, len(prompt))
            at = max(at, stop)
        return found

    def _take(self, ids: bytes, places: Iterable[tuple[int, int]]) -> None:
        for start, stop in places:
            self._table.add(Content(ids[4 * start : 4 * stop]))


def _pieces(prompt: Prompt, rule: CutRule) -> Iterator[tuple[int, int, Content]]:
    digests = {m.start: m.digest for m in prompt.media}
    cuts = cut(prompt, rule)
    for start, stop in itertools.pairwise(cuts):
        yield start, stop, Content(prompt.slice(start, stop), digests.get(start, ""))
