"""The content index: finds parts of a prompt in earlier prompts, as a prefix or at any position."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kamera.content import Ids, gear
from kamera.reuse.cuts import cut_prompt, fixed_cuts
from kamera.reuse.parts import Part, Text, choose_parts, divide, fill_gaps
from kamera.reuse.paths import ROOT, Paths
from kamera.reuse.prompt import Prompt
from kamera.reuse.radix import ids_of
from kamera.reuse.rules import CutRule
from kamera.reuse.scan import MOST, WINDOW, Place, Scan, window_stops
from kamera.reuse.table import Content, SegmentTable

LEAST = 16
"""Fewest tokens of a part of a segment that is cut out of a prompt for itself."""

_NODE, _WINDOW = 1_000, 200  # bytes of a node and of a window in memory, about
_BACK = 1024  # tokens before a window that are compared: what is equal further back has windows of its own


class Hit(NamedTuple):
    """Tokens ``start`` to ``stop`` of a prompt equal ``segment`` of the index from its token ``offset`` on.

    Their antecedents may differ, and with them their KV.
    """

    start: int
    stop: int
    segment: int
    offset: int = 0


@dataclass(frozen=True)
class Found:
    """Parts of a prompt seen before: its first ``prefix`` tokens, and ``hits`` behind them, in order.

    ``cuts`` are the borders of the prompt's segments, 0 and its length among them: what came before as a
    segment is one again, the part of one is cut out, and the rest is cut by the rule. ``kept`` are the spans
    among them that the index gave, prefix included.
    """

    prefix: int
    hits: tuple[Hit, ...]
    cuts: tuple[int, ...]
    kept: tuple[tuple[int, int], ...] = ()


class ContentIndex:
    """Segments and prompts of one model and tenant, cut by one rule, in memory. Not thread-safe.

    Of more than ``limit`` bytes (None: any number) the ends of those prompts leave that were added or found
    longest ago; ``evicted`` counts their segments.
    """

    def __init__(self, rule: CutRule, *, limit: int | None = None) -> None:
        self.rule = rule
        self.limit = limit
        self.evicted = 0
        self._table = SegmentTable()
        self._paths = Paths(self._table)
        self._scan = Scan()
        self._bytes = 0
        self._now = 0
        self._leaves: list[tuple[int, int]] = []  # a heap of last uses and nodes; some are out of date

    def __len__(self) -> int:
        """Number of distinct segments."""
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, about."""
        return self._bytes + self._scan.nbytes

    def content(self, segment: int) -> Content:
        """Ids and media of a segment by its number. Raises `KeyError` for one that is not there."""
        return self._table[segment]

    def find(self, prompt: Prompt, edges: Sequence[int] = ()) -> Found:
        """The parts of ``prompt`` that were added before. Adds nothing; what is found is used last.

        The prompt is cut at ``edges`` too.

        Any 63 tokens of a text that were added one after another are found, with all that is equal around
        them; fewer if they are whole segments.
        """
        text = Text(prompt)
        path = self._paths.longest_onward(text, ROOT, 0)
        prefix = path[-1].stop if path else 0
        parts = [*path, *(self._parts_behind(text, prefix) if prefix < len(prompt) else ())]
        self._use(parts)
        parts = divide(parts, sorted({*fixed_cuts(prompt, self.rule), *edges}))
        segments = [part for part in parts if self._whole(part) or part.stop - part.start >= LEAST]
        spans = [(part.start, part.stop) for part in segments]
        cuts = cut_prompt(prompt, self.rule, spans, edges)
        nodes = self._paths
        hits = [Hit(a, b, nodes[node].segment, o) for a, b, node, o in parts if a >= prefix]
        hits += self._segments(prompt, [*itertools.pairwise(cuts)], parts)
        return Found(prefix, tuple(sorted(hits)), tuple(cuts), tuple(spans))

    def add(self, prompt: Prompt, cuts: Sequence[int] | None = None) -> int:
        """Add ``prompt`` in segments between ``cuts`` (default: as found); returns how many are new."""
        old_count, digests = len(self), {m.start: m.digest for m in prompt.media}
        borders = self.find(prompt).cuts if cuts is None else cuts
        self._now += 1
        node = ROOT
        for start, stop in itertools.pairwise(borders):
            distinct = len(self._table)
            content = Content(prompt.slice(start, stop), digests.get(start, ""))
            node, is_new = self._paths.step(node, content)
            if is_new:
                hashes, places = self._windows(node)
                self._scan.add(hashes, places)
                new_bytes = len(content.ids) if len(self._table) > distinct else 0
                self._bytes += _NODE + new_bytes + _WINDOW * len(places)
        new_count = len(self) - old_count
        self._touch(node)
        self._make_room()
        return new_count

    # -- inside --------------------------------------------------------------------------------

    def _parts_behind(self, text: Text, prefix: int) -> list[Part]:
        """Parts behind the prefix, in order and apart: all that is equal around a stored window.

        Where `MOST` stretches go on no other is looked for, so that text that repeats itself costs no more.
        """
        candidates: list[Part] = []
        visits: set[tuple[int, int]] = set()  # nodes that were met, and where in the prompt they would begin
        ends: list[int] = []  # a heap of where stretches end
        for stop, places in self._scan.candidates(text.prompt.ids):
            start = stop - WINDOW
            if start < prefix or not text.plain(start, stop):
                continue
            while ends and ends[0] < stop:
                heapq.heappop(ends)
            for node, offset in places if len(ends) < MOST else ():
                if (node, stop - offset) in visits:
                    continue
                parts = self._paths.longest_around(text, node, offset, stop, max(prefix, start - _BACK))
                if parts and parts[0].start <= start and stop <= parts[-1].stop:
                    candidates += parts
                    heapq.heappush(ends, parts[-1].stop)
                    visits.update((part.node, part.start - part.offset) for part in parts)
        whole = choose_parts([p for p in candidates if p.stop - p.start >= LEAST and self._whole(p)])
        return fill_gaps(whole, candidates, prefix, len(text.prompt))

    def _whole(self, part: Part) -> bool:
        return part.offset == 0 and part.stop - part.start == self._paths.content(part.node).tokens

    def _segments(
        self, prompt: Prompt, pieces: Sequence[tuple[int, int]], parts: Sequence[Part]
    ) -> Iterator[Hit]:
        """Whole segments among the pieces of which nothing is found yet: short ones, and pictures."""
        digests = {m.start: m.digest for m in prompt.media}
        edges = iter([*parts, Part(len(prompt), len(prompt), ROOT, 0)])
        edge = next(edges)
        for start, stop in pieces:
            while edge.stop <= start and edge.start < len(prompt):
                edge = next(edges)
            if stop <= edge.start and start < stop:
                number = self._table.find(Content(prompt.slice(start, stop), digests.get(start, "")))
                if number is not None:
                    yield Hit(start, stop, number)

    def _windows(self, node: int) -> tuple[Ids, list[Place]]:
        """Hashes and places of the windows that end in a node."""
        entry = self._paths[node]
        ids = self._paths.content(node).ids
        begin = entry.stop - len(ids) // 4
        stops = window_stops(begin - entry.run, entry.stop - entry.run)
        if entry.stop == entry.run or not len(stops):
            return np.zeros(0, np.uint32), []
        tail = self._paths.tail(entry.parent, WINDOW - 1)
        offsets = stops + entry.run - begin
        hashes = gear(ids_of(tail + ids))[offsets + len(tail) // 4 - 1]
        return hashes, [(node, offset) for offset in offsets.tolist()]

    def _use(self, parts: Sequence[Part]) -> None:
        self._now += 1
        for part in parts:
            self._touch(part.node)

    def _touch(self, node: int) -> None:
        if node != ROOT:
            self._paths[node].last_use = self._now
            if self.limit is not None and not self._paths[node].children:
                heapq.heappush(self._leaves, (self._now, node))
                if len(self._leaves) > 2 * len(self._paths) + WINDOW:
                    self._leaves = [(use, n) for use, n in self._leaves if self._may_go(use, n)]
                    heapq.heapify(self._leaves)

    def _may_go(self, use: int, node: int) -> bool:
        """True for a node that is there, has no children, and was not used since."""
        entry = self._paths.get(node)
        return entry is not None and not entry.children and entry.last_use == use

    def _make_room(self) -> None:
        while self.limit is not None and self.nbytes > self.limit and self._leaves:
            use, node = heapq.heappop(self._leaves)
            if not self._may_go(use, node):
                continue
            hashes, _ = self._windows(node)
            self._scan.remove(hashes, node)
            parent = self._paths[node].parent
            self._bytes -= _NODE + _WINDOW * len(hashes) + (self._paths.remove(node) or 0)
            if parent != ROOT and not self._paths[parent].children:
                heapq.heappush(self._leaves, (self._paths[parent].last_use, parent))
            self.evicted += 1
