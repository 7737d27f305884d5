"""The content index: finds parts of a prompt in earlier prompts, as a prefix or at any position.

A radix tree knows what texts begin with; a trie of segments has every added prompt as a path from its root;
segments are distinct by content, found by a fast hash and then compared token by token; a scan looks for
stored windows of 32 tokens at every position, in one pass. The last
texts are remembered by how they begin.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from kamera.content import Chunk, Ids, Places, gear
from kamera.reuse.prompt import CutRule, Prompt, cut_prompt, fixed_cuts
from kamera.window import SHORTEST_HEAD

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


# -- texts by what they begin with -----------------------------------------------------------------


class Along(NamedTuple):
    """Strings met along a text: ``values`` of those that it begins with, the shortest first.

    ``common`` tokens are shared with some string, that of ``value``; None if there is none.
    """

    values: tuple[int, ...]
    common: int
    value: int | None


class Radix:
    """Strings of token ids (4 bytes each, little-endian), each with a number. No string is empty."""

    __slots__ = ("_children", "_edge", "_value")

    def __init__(self, edge: bytes = b"", value: int | None = None) -> None:
        self._edge = edge
        self._value = value
        self._children: dict[bytes, Radix] = {}

    def add(self, ids: bytes, value: int) -> None:
        """Add a string; one that is there has the new number."""
        node, at = self, 0
        while at < len(ids):
            child = node._children.get(ids[at : at + 4])
            if child is None:
                node._children[ids[at : at + 4]] = Radix(ids[at:], value)
                return
            same = 4 * common_head(ids_of(child._edge), ids_of(ids[at : at + len(child._edge)]))
            if same < len(child._edge):
                child._split(same)
            node, at = child, at + same
        node._value = value

    def remove(self, ids: bytes) -> None:
        """Remove a string that is there."""
        trail, at = [self], 0
        while at < len(ids):
            trail.append(trail[-1]._children[ids[at : at + 4]])
            at += len(trail[-1]._edge)
        trail[-1]._value = None
        for parent, node in zip(reversed(trail[:-1]), reversed(trail[1:]), strict=True):
            if node._value is not None or len(node._children) > 1:
                return
            if node._children:  # one string goes on: its edge joins
                (only,) = node._children.values()
                node._edge += only._edge
                node._value, node._children = only._value, only._children
                return
            del parent._children[node._edge[:4]]

    def strings_along(self, raw: bytes, start: int, stop: int) -> Along:
        """The strings along tokens ``start`` to ``stop`` of ``raw``."""
        node, at, end = self, 4 * start, 4 * stop
        values: list[int] = []
        while at < end:
            child = node._children.get(raw[at : at + 4])
            if child is None:
                break
            if len(child._edge) <= end - at and raw.startswith(child._edge, at):
                node, at = child, at + len(child._edge)
                if node._value is not None:
                    values.append(node._value)
                continue
            rest = raw[at : min(end, at + len(child._edge))]
            common = common_head(ids_of(child._edge[: len(rest)]), ids_of(rest))
            return Along(tuple(values), at // 4 - start + common, child._any_number())
        return Along(tuple(values), at // 4 - start, node._any_number())

    def _split(self, at: int) -> None:
        rest = Radix(self._edge[at:], self._value)
        rest._children = self._children
        self._edge, self._value, self._children = self._edge[:at], None, {rest._edge[:4]: rest}

    def _any_number(self) -> int | None:
        """The number of a string that goes through here."""
        node = self
        while node._value is None and node._children:
            node = next(iter(node._children.values()))
        return node._value


def common_head(a: Ids, b: Ids) -> int:
    """Number of equal first ids."""
    count = min(len(a), len(b))
    differ = a[:count] != b[:count]
    return int(differ.argmax()) if differ.any() else count


def ids_of(raw: bytes) -> Ids:
    """Token ids of their bytes."""
    return np.frombuffer(raw, "<u4")


# -- segments, and prompts as paths of them --------------------------------------------------------


class Content(NamedTuple):
    """Identity of a segment: token ids (4 bytes each, little-endian) and the media's digest."""

    ids: bytes
    media: str = ""

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids) // 4


class SegmentTable:
    """Segments numbered from 0 in the order of addition."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, list[int]] = {}
        self._contents: dict[int, Content] = {}
        self._uses: dict[int, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._contents)

    def __getitem__(self, number: int) -> Content:
        return self._contents[number]

    def find(self, content: Content) -> int | None:
        """The number of the segment with equal tokens and media, or None.

        A segment of equal hash and different tokens is not a match.
        """
        same = self._numbers.get(content_key(content), ())
        return next((number for number in same if self._contents[number] == content), None)

    def add(self, content: Content) -> int:
        """The number of ``content``, added if it is new; each call is one use (`release`)."""
        number = self.find(content)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers.setdefault(content_key(content), []).append(number)
            self._contents[number] = content
        self._uses[number] = self._uses.get(number, 0) + 1
        return number

    def release(self, number: int) -> bool:
        """End one use; True if it was the last, and the segment is gone."""
        self._uses[number] -= 1
        if self._uses[number]:
            return False
        key = content_key(self._contents.pop(number))
        self._numbers[key].remove(number)
        if not self._numbers[key]:
            del self._numbers[key]
        del self._uses[number]
        return True


def content_key(content: Content) -> bytes:
    """xxh3-128 of ids and media. Not collision-resistant: compare the tokens after a look-up."""
    ids = content.ids + content.media.encode() if content.media else content.ids
    return xxh3_128_digest(ids)


class Part(NamedTuple):
    """Tokens ``start`` to ``stop`` of a prompt equal those of a node's segment from ``offset`` on."""

    start: int
    stop: int
    node: int
    offset: int

    def clip(self, low: int, high: int) -> Part:
        """The part within ``low`` to ``high``, empty or less (``stop <= start``) if it is outside."""
        start = max(self.start, low)
        return Part(start, min(self.stop, high), self.node, self.offset + start - self.start)


@dataclass(eq=False)
class Text:
    """A prompt, with the limits of its texts: nothing is compared across a picture's edge."""

    prompt: Prompt

    @cached_property
    def starts(self) -> list[int]:
        """Starts of pictures, in order."""
        return [one.start for one in self.prompt.media]

    @cached_property
    def stops(self) -> list[int]:
        """Stops of pictures, in order."""
        return [one.stop for one in self.prompt.media]

    def text_end(self, at: int) -> int:
        """Where the text that holds token ``at`` ends."""
        index = bisect_left(self.starts, at)
        return self.starts[index] if index < len(self.starts) else len(self.prompt)

    def opening(self, at: int) -> int:
        """Where the text that ends at ``at``, or goes on there, begins."""
        index = bisect_right(self.stops, at)
        return self.stops[index - 1] if index else 0

    def plain(self, start: int, stop: int) -> bool:
        """True if no token of ``start`` to ``stop`` is a picture's."""
        index = bisect_left(self.starts, stop)
        return not index or self.stops[index - 1] <= start

    def picture(self, *, start: int = -1, stop: int = -1) -> tuple[int, int, Content] | None:
        """The picture that starts, or stops, there: its tokens and content."""
        places, at = (self.starts, start) if stop < 0 else (self.stops, stop)
        index = bisect_left(places, at)
        if index == len(places) or places[index] != at:
            return None
        one = self.prompt.media[index]
        return one.start, one.stop, Content(self.prompt.slice(one.start, one.stop), one.digest)


def choose_parts(parts: Sequence[Part]) -> list[Part]:
    """Those parts, none over another, that have the most tokens together, in order."""
    by_stop = sorted({(p.start, p.stop): p for p in parts}.values(), key=attrgetter("stop"))
    stops = [p.stop for p in by_stop]
    best = [0]  # of the first n parts, the most tokens
    for i, part in enumerate(by_stop):
        best.append(max(best[i], best[bisect_right(stops, part.start, 0, i)] + part.stop - part.start))
    out: list[Part] = []
    i = len(by_stop)
    while i:
        if best[i] == best[i - 1]:
            i -= 1
            continue
        out.append(by_stop[i - 1])
        i = bisect_right(stops, out[-1].start, 0, i - 1)
    return out[::-1]


def fill_gaps(taken: Sequence[Part], parts: Sequence[Part], first: int, last: int) -> list[Part]:
    """``taken``, and ``parts`` clipped to the gaps between them, ``first`` and ``last``, in order."""
    rest = iter(sorted(parts))
    part, far = next(rest, None), Part(first, first, 0, 0)
    out: list[Part] = []
    at = first
    for one in (*taken, Part(last, last, 0, 0)):
        while at < one.start:
            while part is not None and part.start <= at:
                far = max(far, part, key=attrgetter("stop"))
                part = next(rest, None)
            if far.stop > at:
                out.append(far.clip(at, one.start))
                at = out[-1].stop
            else:
                at = one.start if part is None else min(one.start, part.start)
        if one.stop > one.start:
            out.append(one)
        at = one.stop
    return out


def divide(parts: Sequence[Part], edges: Sequence[int]) -> list[Part]:
    """The parts, none of them across an edge (ascending)."""
    out: list[Part] = []
    for part in parts:
        inner = edges[bisect_right(edges, part.start) : bisect_left(edges, part.stop)]
        borders = itertools.pairwise([part.start, *inner, part.stop])
        out += [part.clip(low, high) for low, high in borders]
    return out


ROOT = 0


@dataclass(eq=False)
class Node:
    """A segment after all those above it.

    ``stop``: tokens of the path that ends here. ``run``: where on it the text begins that it ends in.
    ``last_use``: its moment.
    """

    parent: int
    segment: int
    stop: int
    run: int
    last_use: int = 0
    children: int = 0
    texts: Radix = field(default_factory=Radix)


class Paths:
    """A trie whose node n is one segment after all those above it. Nodes count from 1, none twice."""

    def __init__(self, table: SegmentTable) -> None:
        self._table = table
        self._nodes = {ROOT: Node(-1, -1, 0, 0)}
        self._next = ROOT + 1
        self._steps: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, node: int) -> Node:
        return self._nodes[node]

    def get(self, node: int) -> Node | None:
        """The node; None if there is none, or no more."""
        return self._nodes.get(node)

    def content(self, node: int) -> Content:
        """The node's segment."""
        return self._table[self._nodes[node].segment]

    def child(self, node: int, content: Content) -> int | None:
        """The child of ``node`` for a segment; None if there is none."""
        number = self._table.find(content)
        return None if number is None else self._steps.get((node, number))

    def step(self, node: int, content: Content) -> tuple[int, bool]:
        """As `child`, and True if it was created. Raises `KeyError` for an unknown node."""
        parent, child = self._nodes[node], self.child(node, content)
        if child is not None:
            return child, False
        segment, new = self._table.add(content), self._next
        stop = parent.stop + content.tokens
        self._next += 1
        self._nodes[new] = Node(node, segment, stop, stop if content.media else parent.run)
        self._steps[node, segment] = new
        parent.children += 1
        if not content.media:
            parent.texts.add(content.ids, new)
        return new, True

    def remove(self, node: int) -> int | None:
        """Remove a node without children; its content's bytes if no other node has it, else None."""
        content = self.content(node)
        entry = self._nodes.pop(node)
        parent = self._nodes[entry.parent]
        parent.children -= 1
        parent.last_use = max(parent.last_use, entry.last_use)
        del self._steps[entry.parent, entry.segment]
        if not content.media:
            parent.texts.remove(content.ids)
        return len(content.ids) if self._table.release(entry.segment) else None

    def tail(self, node: int, count: int) -> bytes:
        """The ids of at most ``count`` tokens with which the text that ends at ``node`` ends."""
        ids, size = b"", 4 * min(count, self._nodes[node].stop - self._nodes[node].run)
        while len(ids) < size:
            ids = self.content(node).ids + ids
            node = self._nodes[node].parent
        return ids[len(ids) - size :]

    def longest_onward(self, text: Text, node: int, at: int) -> list[Part]:
        """The longest path below ``node`` that the prompt goes on along from token ``at``.

        The last part may be the head of its segment; of paths of one length, the one of most whole segments.
        """
        prompt, best, best_link = text.prompt, (at, 0), None
        ends: list[tuple[int, int, int, _Link]] = [(node, at, 0, None)]
        while ends:
            node, at, whole, link = ends.pop()
            if (at, whole) > best:
                best, best_link = (at, whole), link
            picture = text.picture(start=at)
            if picture is not None:
                _, stop, content = picture
                child = self.child(node, content)
                if child is not None:
                    ends.append((child, stop, whole + stop - at, (link, Part(at, stop, child, 0))))
                continue
            along = self._nodes[node].texts.strings_along(prompt.raw, at, text.text_end(at))
            for child in along.values:
                stop = at + self.content(child).tokens
                ends.append((child, stop, whole + stop - at, (link, Part(at, stop, child, 0))))
            if along.value is not None and (at + along.common, whole) > best:
                best = at + along.common, whole
                best_link = link, Part(at, at + along.common, along.value, 0)
        return [*_unlink(best_link)][::-1]

    def longest_around(self, text: Text, node: int, offset: int, at: int, first: int) -> list[Part]:
        """The longest part of a path through ``node`` that the prompt has around token ``at``.

        What ends before the segment's token ``offset`` ends before ``at``; nothing before ``first`` counts.
        """
        parts = self._backward(text, node, offset, at, first)[::-1]
        ids = self.content(node).ids[4 * offset :]
        count = common_head(ids_of(ids), text.prompt.ids[at : text.text_end(at)])
        if count:
            start, begin = (at, offset) if not parts else (parts[-1].start, parts[-1].offset)
            parts[-1:] = [Part(start, at + count, node, begin)]
        return parts + (self.longest_onward(text, node, at + count) if 4 * count == len(ids) else [])

    def _backward(self, text: Text, node: int, offset: int, at: int, first: int) -> list[Part]:
        """The parts before token ``at`` that equal the path before a node's token ``offset``, last first."""
        parts: list[Part] = []
        while node != ROOT:
            content = self.content(node)
            if content.media:
                picture = text.picture(stop=at)
                if picture is None or picture[2] != content or picture[0] < first:
                    break
                count = content.tokens
            else:
                low = max(first, text.opening(at))
                ids = text.prompt.ids[low:at][::-1]
                count = common_head(ids_of(content.ids[: 4 * offset])[::-1], ids)
            if count:
                parts.append(Part(at - count, at, node, offset - count))
                at -= count
            if count < offset:
                break
            node = self._nodes[node].parent
            offset = 0 if node == ROOT else self.content(node).tokens
        return parts


_Link = tuple["_Link", Part] | None


def _unlink(link: _Link) -> Iterator[Part]:
    while link is not None:
        link, part = link
        yield part


# -- windows of tokens at any position -------------------------------------------------------------


WINDOW = 32
"""Tokens of a window: the hash's window."""

MOST = 8
"""Places of equal windows that are kept, the last ones: each may go on in another way."""

Place = tuple[int, int]
"""A node, and the token of its segment before which a window ends."""

_ROOM = 16  # slots of the table per hash: one look-up in 16 is a false positive, which the places refuse
_SMALLEST = 16
_LARGEST = 27  # bits of the table's size: 128 MiB, full at eight million windows


class Scan:
    """Places of stored windows by the hash of their tokens."""

    def __init__(self) -> None:
        self._places: dict[int, list[Place]] = {}
        self._marks: NDArray[np.bool_] = np.zeros(1 << _SMALLEST, bool)
        self._bits = _SMALLEST

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._marks.nbytes

    def add(self, hashes: Ids, places: Iterable[Place]) -> None:
        """Add windows; of more than `MOST` equal ones the first go."""
        for value, place in zip(hashes.tolist(), places, strict=True):
            bucket = self._places.setdefault(value, [])
            bucket.append(place)
            del bucket[:-MOST]
        if len(self._places) * _ROOM > len(self._marks) and self._bits < _LARGEST:
            self._bits = min(_LARGEST, (len(self._places) * _ROOM).bit_length())
            self._marks = np.zeros(1 << self._bits, bool)
            hashes = np.fromiter(self._places, np.uint32, len(self._places))
        self._marks[self._slots(hashes)] = True

    def remove(self, hashes: Ids, node: int) -> None:
        """Remove a node's windows. Their marks stay: they are false positives from then on."""
        for value in hashes.tolist():
            rest = [place for place in self._places.get(value, ()) if place[0] != node]
            if rest:
                self._places[value] = rest
            else:
                self._places.pop(value, None)

    def candidates(self, ids: Ids) -> Iterator[tuple[int, list[Place]]]:
        """Stops of windows of ``ids`` whose hash is stored, in order, with the places of that hash."""
        if len(ids) < WINDOW:
            return
        hashes = gear(ids)
        for stop in (np.flatnonzero(self._marks[self._slots(hashes[WINDOW - 1 :])]) + WINDOW).tolist():
            places = self._places.get(int(hashes[stop - 1]))
            if places:
                yield stop, places

    def _slots(self, hashes: Ids) -> Ids:
        return hashes >> np.uint32(32 - self._bits)  # the high bits depend on all of the window


def window_stops(start: int, stop: int) -> Places:
    """Stops in ``start`` (excluded) to ``stop`` of the windows of a text, counted from where it begins.

    Windows follow each other without a gap, so any 63 tokens of a text hold a whole one.
    """
    first = max(1, start // WINDOW + 1) * WINDOW
    return np.arange(first, stop + 1, WINDOW)


# -- the last texts --------------------------------------------------------------------------------


_TEXTS = 4096  # that are remembered, at 8 bytes per token
_ALIKE = 64  # texts of one head that are compared, the last ones


class Seen:
    """The last texts, to find those that begin as a new one does. Not thread-safe."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, Chunk] = OrderedDict()
        self._ids_by_head: dict[tuple[int, ...], dict[str, None]] = {}

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Remember the texts among ``chunks``; the oldest of too many go."""
        for chunk in chunks:
            if not chunk.inputs and chunk.num_tokens >= SHORTEST_HEAD:
                self._texts[chunk.id] = chunk
                self._texts.move_to_end(chunk.id)
                alike = self._ids_by_head.setdefault(_head(chunk), {})
                alike.pop(chunk.id, None)
                alike[chunk.id] = None
        while len(self._texts) > _TEXTS:
            name, chunk = self._texts.popitem(last=False)
            alike = self._ids_by_head[_head(chunk)]
            del alike[name]
            if not alike:
                del self._ids_by_head[_head(chunk)]

    def texts_with_head(self, chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
        """The texts that share a shortest head with one of ``chunks``, the last 64 of each head."""
        heads = dict.fromkeys(_head(chunk) for chunk in chunks if not chunk.inputs)
        alike = (list(self._ids_by_head.get(head, ()))[-_ALIKE:] for head in heads)
        return tuple(self._texts[name] for names in alike for name in names)


def _head(chunk: Chunk) -> tuple[int, ...]:
    return tuple(chunk.input_ids[:SHORTEST_HEAD].tolist())
